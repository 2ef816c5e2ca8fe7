"""Which CTA of the fast kernel, or of the local matmul, computes which tile of which step, and in which order?

CTAs work in rounds of one tile each. Where that saves a round, the last round of a step goes on into the next one: the
tiles of all steps are dealt out in one sequence, so the first tile of a step goes to the CTA after the one that has the
last tile of the step before. Every CTA still goes through the steps in order, but it may have no tile in some of them.

Where the last round of all has tiles for at most half of the CTAs, two of them share each: they compute half of its
rows each, as the last thing they do. `cmm.hopper.deal` says when; the local matmul does the same, as one step.
"""

import dataclasses

from jax import lax, numpy as jnp
from jax.experimental import pallas as pl

from cmm.hopper import slots
from cmm.hopper.deal import Deal
from cmm.hopper.plan import Plan


@dataclasses.dataclass(frozen=True)
class Rounds:
    """The tiles of all steps, dealt out to CTAs, for kernels that span steps and compute halves of tiles.

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
    def deal(self) -> Deal:
        """How the tiles are dealt out."""
        plan = self.plan
        return plan.config.deal(plan.m, plan.n, plan.num_ctas, self.axis_size)

    @property
    def span_steps(self) -> bool:
        """Whether tiles are dealt out in one sequence, over the ends of steps."""
        return self.deal.spans_steps

    @property
    def steps_overlap(self) -> bool:
        """Whether CTAs that are in the next step already wait for what others send in this one."""
        return self.deal.steps_overlap

    def for_each_step(self, function, memory: dict, first: int = 0) -> None:
        """Calls `function(step, tiles, first_use, memory)` for the whole tiles of each step, then for the halves.

        Args:
          function: takes a step, its tiles of which this CTA may have none, the number of uses that this CTA has before
            them (see `cmm.hopper.roles`), and the memory for them.
          memory: as `cmm.hopper.roles.memory` describes it.
          first: the first step.
        """
        last = self.axis_size - 1

        def whole_tiles(step):
            function(step, self.of_step(step), self.first_use(step), memory)

        if first == last:
            whole_tiles(last)
        else:
            pl.loop(first, self.axis_size)(whole_tiles)
        if self.deal.halved:
            halves = self.halves()
            stages = {
                "a_smem": memory["a_smem"].at[:, : halves.config.cta_tile_m],
                "a_images": slots.first_half(memory["a_images"], halves),
            }
            function(last, halves, self.first_use(self.axis_size), memory | stages)

    def of_step(self, step) -> Plan:
        """Returns the whole tiles of one step, of which this CTA may have none."""
        if not self.span_steps:
            return self.plan
        whole = self.plan.tiles - self.deal.halved * (step == self.axis_size - 1)
        return StepPlan(**vars(self.plan), step=step, whole=whole)

    def halves(self) -> Plan:
        """Returns the halves of tiles, with which the last step ends. This CTA has one or none."""
        plan = self.plan
        return HalfPlan(
            **vars(plan) | {"config": plan.config.half()}, step=self.axis_size - 1, uncut=plan, halved=self.deal.halved
        )

    def first_use(self, step):
        """Returns how many uses this CTA has before a step (see `cmm.hopper.roles`).

        For `axis_size`, which is no step, it returns how many it has for whole tiles.
        """
        return self._first_tile(step) * self.plan.k_steps

    def my_tiles(self):
        """Returns how many tiles this CTA computes in all steps; a half counts as one."""
        whole = self._first_tile(self.axis_size)
        return whole + self.halves().my_tiles() if self.deal.halved else whole

    def _first_tile(self, step):
        plan, halved = self.plan, self.deal.halved
        if not self.span_steps:
            return step * self.tiles_per_step
        before = step * plan.tiles
        if halved:
            before = jnp.minimum(before, self.axis_size * plan.tiles - halved)
        return lax.div(before - plan.cta() + plan.num_ctas - 1, plan.num_ctas)

    def tile_at(self, number):
        """Returns step, row and column of this CTA's tile `number`, counted over all steps; for a half, of its tile."""
        plan, halved = self.plan, self.deal.halved
        if not self.span_steps:
            return lax.div(number, self.tiles_per_step), *plan.tile_at(lax.rem(number, self.tiles_per_step))
        linear = plan.cta() + number * plan.num_ctas
        if halved:
            whole = self.axis_size * plan.tiles - halved
            linear = jnp.minimum(linear, whole + lax.div(linear - whole, 2))
        return lax.div(linear, plan.tiles), *plan.place(lax.rem(linear, plan.tiles))


@dataclasses.dataclass(frozen=True)
class StepPlan(Plan):
    """The tiles of one step of those that share rounds: CTAs are counted from the one that has its first tile.

    Attributes:
      step: of the ring; may be known only inside the kernel.
      whole: how many of its tiles are not halved; likewise.
    """

    step: object
    whole: object

    def cta(self):
        tiles_back = -self.tiles % self.num_ctas
        return lax.rem(lax.axis_index("cta") + self.step * tiles_back, self.num_ctas)

    def my_tiles(self):
        return lax.div(self.whole - self.cta() + self.num_ctas - 1, self.num_ctas)


@dataclasses.dataclass(frozen=True)
class HalfPlan(Plan):
    """The halves of the last tiles of the last step, above each other: one for each CTA, until there are no more.

    Its configuration is that of halves, so its rows are half as high.

    Attributes:
      step: the last one.
      uncut: the tiles of the step.
      halved: how many of them are cut in two.
    """

    step: int
    uncut: Plan
    halved: int

    def my_tiles(self):
        return lax.select(self.cta() < 2 * self.halved, jnp.int32(1), jnp.int32(0))

    def tile_at(self, index):
        cta = self.cta()
        row, n_tile = self.uncut.place(self.uncut.tiles - self.halved + lax.div(cta, 2))
        return 2 * row + lax.rem(cta, 2), n_tile

    def row(self, m_tile):
        return lax.div(m_tile, 2)

    def rows_in_tile(self, m_tile, rows):
        return pl.ds(lax.rem(m_tile, 2) * rows, rows)
