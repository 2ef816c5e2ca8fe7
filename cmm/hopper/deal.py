"""How many rounds of one tile each do CTAs need for a product, or for all products of a ring?

Three ways to deal out tiles, from the plainest to the one that wastes least:

- *Apart*: each step has rounds of its own. In the last one some CTAs have no tile.
- *Spanning steps*: the tiles of all steps are dealt out in one sequence, so a round goes on into the next step.
- *Halving the rest*: where the last round of all has tiles for at most half of the CTAs, each of these tiles is cut in
  two halves above each other, one for each of two CTAs. On one H200 (`cmm.hopper.loopback`) such a round took half of
  the time of another one or somewhat more, and kernels 2 to 12 % less time: one product of 768 rows 36.7 µs in place of
  41.5, four of 1024 x 4096 x 3584 157 in place of 162. With many rounds there is little to gain: where multiprocessors
  idle, rounds were seen to be faster, presumably because power is the limit. Halves in the first round, while the first
  tiles of the next step arrive, gained nothing: kernels took as long, or up to 5 µs longer.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Deal:
    """The tiles of all steps, dealt out in the way that needs the fewest rounds.

    Attributes:
      tiles: of one step.
      num_ctas: how many CTAs work at the same time.
      steps: how many products of `tiles` tiles a kernel computes. Only one that can begin a step before all CTAs are
        through with the one before has more than one here.
      can_halve: whether the kernel computes halves of tiles.
    """

    tiles: int
    num_ctas: int
    steps: int = 1
    can_halve: bool = False

    @property
    def halved(self) -> int:
        """How many tiles are cut in two: those of the last round, if they are few enough, and all of one step.

        Not so if there is no whole round before, or if less than a tenth of all places, rounds times CTAs, would be
        empty; nor in a ring where there is but one whole round before, or where a round spans more than three steps.
        """
        rest, before = self._all % self.num_ctas, self._all // self.num_ctas
        fits = 2 * rest <= self.num_ctas and rest <= self.tiles and before >= 1
        pays_off = self._all <= 0.9 * self.rounds * self.num_ctas
        if self.steps > 1:
            pays_off &= before >= 2 and self.num_ctas <= 3 * self.tiles
        return rest if self.can_halve and fits and pays_off else 0

    @property
    def rounds(self) -> int:
        """How many rounds there are, that of halves among them."""
        return -(-self._all // self.num_ctas)  # Never more than apart.

    @property
    def whole_rounds(self) -> int:
        """How many rounds of whole tiles there are."""
        return self.rounds - bool(self.halved)

    @property
    def spans_steps(self) -> bool:
        """Whether tiles are dealt out in one sequence over all steps: where that saves a round, or tiles are halved.

        On one H200 that is its own neighbour (`cmm.hopper.loopback`), kernels took 4 to 15 % less time so with 100 to
        240 tiles in a step, and up to 40 % less with fewer.
        """
        return self.rounds < self._apart or self.halved > 0

    @property
    def steps_overlap(self) -> bool:
        """Whether CTAs that are in the next step already wait for what others send in this one.

        With two rounds of tiles or more in a step, what they need has been there for a round.
        """
        return self.steps > 1 and self.spans_steps and self.tiles < 2 * self.num_ctas

    def with_fewest_ctas(self) -> "Deal":
        """Returns the deal with the fewest CTAs that need no more rounds: the others would only take power."""
        cost = (self.rounds, not self.halved)
        deals = (dataclasses.replace(self, num_ctas=num_ctas) for num_ctas in range(1, self.num_ctas + 1))
        return next(deal for deal in deals if (deal.rounds, not deal.halved) <= cost)

    @property
    def _all(self) -> int:
        return self.steps * self.tiles

    @property
    def _apart(self) -> int:
        return self.steps * -(-self.tiles // self.num_ctas)
