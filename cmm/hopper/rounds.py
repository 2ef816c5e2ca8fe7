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
      uses_per_step: of this CTA, if steps do not share rounds; known inside the kernel only (`in_kernel`).
    """

    plan: Plan
    axis_size: int
    uses_per_step: object = None

    def in_kernel(self) -> "Rounds":
        """Returns these rounds as one CTA sees them. The methods below need that."""
        if self.span_steps:
            return self
        return dataclasses.replace(self, uses_per_step=self.plan.my_tiles() * self.plan.k_steps)

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
        """Returns how many uses this CTA has before a step (see `cmm.hopper.roles`); of all, if it is `axis_size`."""
        plan = self.plan
        if not self.span_steps:
            return step * self.uses_per_step
        return lax.div(step * self.tiles - plan.cta() + plan.num_ctas - 1, plan.num_ctas) * plan.k_steps

    def locate(self, use):
        """Returns step, row and column of the tile of the result, and k-step, to which a use of this CTA belongs."""
        plan = self.plan
        if self.span_steps:
            linear = plan.cta() + lax.div(use, plan.k_steps) * plan.num_ctas
            return lax.div(linear, self.tiles), *plan.place(lax.rem(linear, self.tiles)), lax.rem(use, plan.k_steps)
        step, in_step = lax.div(use, self.uses_per_step), lax.rem(use, self.uses_per_step)
        m_tile, n_tile = plan.tile_at(lax.div(in_step, plan.k_steps))
        return step, m_tile, n_tile, lax.rem(in_step, plan.k_steps)


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
