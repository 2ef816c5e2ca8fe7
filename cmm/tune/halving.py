"""How to find the fastest of many without timing all of them well?"""

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence

_KEEP, _KEEP_AT_LEAST = 0.25, 4


@dataclasses.dataclass(frozen=True)
class Trial[T]:
    """What was seen of one candidate.

    Attributes:
      candidate: the candidate.
      screened_us: time of the first, short trial.
      rounds_us: times of the rounds in which the best were compared; empty for the others.
    """

    candidate: T
    screened_us: float
    rounds_us: tuple[float, ...] = ()

    @property
    def time_us(self) -> float:
        """The time that counts: the median over rounds."""
        return statistics.median(self.rounds_us or (self.screened_us,))


def successive_halving[T](
    batches: Iterable[Sequence[T]],
    screen_us: Callable[[Sequence[T]], Sequence[float]],
    compare_us: Callable[[Sequence[T]], Sequence[float]],
    approve: Callable[[T], bool],
    rounds: int,
    stop: Callable[[], bool] = lambda: False,
) -> list[Trial[T]]:
    """Times all candidates shortly, and the best quarter (at least 4) of them and the first in several rounds.

    Args:
      batches: the candidates, in batches that are screened together. The first one is what would be taken without a
        search: a winner must have been compared with it.
      screen_us: times candidates shortly.
      compare_us: times candidates one after the other, for one round. The order differs from round to round.
      approve: says whether a candidate may be among the best; only those that are fast enough are asked about.
      rounds: number of rounds.
      stop: asked after each batch and each round whether to stop here.

    Returns:
      The finalists by their median over rounds, then the others by their short trial.

    Source: Jamieson and Talwalkar (2016), "Non-stochastic Best Arm Identification and Hyperparameter Optimization".
    """
    screened: list[Trial[T]] = []
    for batch in batches:
        screened += [Trial(candidate, time_us) for candidate, time_us in zip(batch, screen_us(batch), strict=True)]
        if stop():
            break
    if not screened:
        return []
    first = screened[0]
    screened.sort(key=lambda trial: trial.screened_us)
    count = max(_KEEP_AT_LEAST, round(_KEEP * len(screened)))
    others = (trial for trial in screened if trial is not first and approve(trial.candidate))
    best = [first] * approve(first.candidate) + list(itertools.islice(others, count))
    times_us: list[list[float]] = [[] for _ in best]
    for index in range(rounds if best else 0):
        order = [(place + index) % len(best) for place in range(len(best))]
        for place, time_us in zip(order, compare_us([best[place].candidate for place in order]), strict=True):
            times_us[place].append(time_us)
        if stop():
            break
    compared = [Trial(t.candidate, t.screened_us, tuple(times)) for t, times in zip(best, times_us, strict=True)]
    losers = [trial for trial in screened if not any(trial is finalist for finalist in best)]
    return sorted(compared, key=lambda trial: trial.time_us) + losers
