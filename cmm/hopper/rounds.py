"""Which CTA of the fast kernel computes which tile of which step, and as its how-manieth?

CTAs work in rounds of one tile each. Where the tiles of a step leave many CTAs of its last round without one, this
round goes on into the next step: the tiles of all steps are dealt out in one sequence, so the first tile of a step goes
to the CTA after the one that has the last tile of the step before. Every CTA still goes through the steps in order, but
it may have no tile in some of them.
"""

import dataclasses

from jax import lax

from cmm.hopper.config import rounds_span_steps, steps_overlap
from cmm.hopper.plan import Plan


@dataclasses.dataclass(frozen=True)
class Rounds:
    """The tiles of all steps, dealt out to CTAs.

    Attributes:
      plan: the tiles of one step.
      axis_size: number of steps.
      tiles_per_step: of this CTA, if steps do not share rounds; known inside the kernel only (`in_kernel`).
    """

    plan: Plan
    axis_size: int
    tiles_per_step: object = None

    def in_kernel(self) -> "Rounds":
        """Returns these rounds as one CTA sees them. The methods below need that."""
        if self.span_steps:
            return self
        return dataclasses.replace(self, tiles_per_step=self.plan.my_tiles())

    @property
    def tiles(self) -> int:
        """Tiles of one step."""
        return self.plan.m_tiles * self.plan.n_tiles

    @property
    def span_steps(self) -> bool:
        """Whether rounds go on into the next step: where that makes them fewer."""
        return rounds_span_steps(self.tiles, self.plan.num_ctas, self.axis_size)

    @property
    def steps_overlap(self) -> bool:
        """Whether CTAs that are in the next step already wait for what others send in this one."""
        return steps_overlap(self.tiles, self.plan.num_ctas, self.axis_size)

    def of_step(self, step) -> Plan:
        """Returns the tiles of one step, of which this CTA may have none."""
        if not self.span_steps:
            return self.plan
        return StepPlan(**vars(self.plan), step=step)

    def first_use(self, step):
        """Returns how many uses this CTA has before a step (see `cmm.hopper.roles`)."""
        return self._first_tile(step) * self.plan.k_steps

    def my_tiles(self):
        """Returns how many tiles this CTA computes in all steps."""
        return self._first_tile(self.axis_size)

    def _first_tile(self, step):
        plan = self.plan
        if not self.span_steps:
            return step * self.tiles_per_step
        return lax.div(step * self.tiles - plan.cta() + plan.num_ctas - 1, plan.num_ctas)

    def tile_at(self, number):
        """Returns step, row and column of this CTA's tile `number`, counted over all steps."""
        plan = self.plan
        if not self.span_steps:
            return lax.div(number, self.tiles_per_step), *plan.tile_at(lax.rem(number, self.tiles_per_step))
        linear = plan.cta() + number * plan.num_ctas
        return lax.div(linear, self.tiles), *plan.place(lax.rem(linear, self.tiles))


@dataclasses.dataclass(frozen=True)
class StepPlan(Plan):
    """The tiles of one step of those that share rounds: CTAs are counted from the one that has its first tile.

    Attributes:
      step: of the ring; may be known only inside the kernel.
    """

    step: object

    def cta(self):
        tiles_back = -(self.m_tiles * self.n_tiles) % self.num_ctas
        return lax.rem(lax.axis_index("cta") + self.step * tiles_back, self.num_ctas)
