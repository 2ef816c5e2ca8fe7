"""In which order does a CTA go through the tiles of all steps of the ring?

A step has `m_tiles * n_tiles` tiles of the result. CTAs work in rounds of one tile each. Where the tiles of a step fill
its last round badly, rounds go on into the next step: tiles of all steps are dealt out in one sequence. A CTA that is
through with its tiles of one step then begins with the next, whose data arrives while others are still at the last.
"""

import dataclasses

from jax import lax

from cmm.hopper.plan import Plan


@dataclasses.dataclass(frozen=True)
class Rounds:
    """The tiles of all steps, dealt out to CTAs.

    Attributes:
      plan: the tiles of one step.
      axis_size: number of steps.
    """

    plan: Plan
    axis_size: int

    @property
    def tiles(self) -> int:
        """Tiles of one step."""
        return self.plan.m_tiles * self.plan.n_tiles

    @property
    def span_steps(self) -> bool:
        """Whether rounds go on into the next step: where that makes them fewer."""
        one_by_one = self.axis_size * _ceil_div(self.tiles, self.plan.num_ctas)
        return _ceil_div(self.axis_size * self.tiles, self.plan.num_ctas) < one_by_one

    @property
    def longest_stride(self) -> int:
        """By how many steps a CTA goes on at most from one of its tiles to the next."""
        return _ceil_div(self.plan.num_ctas, self.tiles) if self.span_steps else 1

    def count(self):
        """Returns how many tiles this CTA computes in all steps."""
        if self.span_steps:
            return _share(self.axis_size * self.tiles, self.plan.num_ctas)
        return self.axis_size * self.plan.my_tiles()

    def at(self, index):
        """Returns step, row and column, in tiles, of this CTA's tile number `index`."""
        if self.span_steps:
            linear = lax.axis_index("cta") + index * self.plan.num_ctas
            return lax.div(linear, self.tiles), *self.plan.snake(lax.rem(linear, self.tiles))
        mine = self.plan.my_tiles()
        return lax.div(index, mine), *self.plan.tile_at(lax.rem(index, mine))


def _share(tiles, num_ctas):
    return lax.div(tiles - lax.axis_index("cta") + num_ctas - 1, num_ctas)


def _ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)
