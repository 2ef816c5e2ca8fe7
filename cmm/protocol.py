"""How often, in what chains and in which order are methods timed?"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from cmm.roofline import Problem

# Rates that large products come near to, to tell what a chain of calls will take: no measurement depends on them.
_ASSUMED_FLOPS_PER_S = {"float16": 600e12, "bfloat16": 600e12, "float32": 45e12}
# As long as the host's clock needs to time a chain well. More calls than that only cost time.
_LONG_CHAIN_US = 18_000
_LONG_CALL_US = 1000

# What a comparison of methods needs: they differ between processes, and between rounds of one.
LEAST_PROCESSES, LEAST_ROUNDS_IN_ALL = 3, 20


@dataclasses.dataclass(frozen=True)
class Protocol:
    """How often and in what chains calls are timed.

    Attributes:
      rounds: every method is timed once per round, so that drift hits all of them alike (see `order_in_round`).
      operand_sets: number of distinct operand pairs, and of calls that are chained in one program (see `cmm.chain`).
      recorded_starts: so often the chain is started while the GPUs are recorded.
      short_chain: calls, one program each, in the shorter chain on the host's clock.
      long_chain: calls in the longer one. The time per call is the difference over the difference in calls.
      short_starts: starts of the chained program in the shorter chain of starts.
      long_starts: starts in the longer one.
    """

    rounds: int
    operand_sets: int
    recorded_starts: int
    short_chain: int
    long_chain: int
    short_starts: int
    long_starts: int

    def in_words(self, methods: Sequence[str], first_round: int = 0) -> str:
        """Returns a sentence for result files.

        Args:
          methods: names of those that were timed, in the order of the ladder.
          first_round: number of the first round, over all processes.
        """
        order = order_in_words([(methods, range(first_round, first_round + self.rounds))])
        return (
            f"{self.rounds} rounds, methods interleaved in {order}; {self.operand_sets} calls on distinct operand "
            f"pairs chained in a program; call time: busy time of the slowest GPU, median over the calls of "
            f"{self.recorded_starts} recorded start{'s' * (self.recorded_starts != 1)} but the first call of each; "
            f"kernel time: its matmul kernels alone, likewise; wall time in a program: {self.short_starts} and "
            f"{self.long_starts} starts, difference per call; wall time alone: one call per program, "
            f"{self.short_chain} and {self.long_chain} calls, difference per call; medians over rounds, one process"
        )

    def on_host_in_words(self) -> str:
        """Returns a sentence for result files of simulated devices."""
        return f"{self.rounds} rounds of single calls on the host's clock"


ON_GPUS = Protocol(
    rounds=20, operand_sets=8, recorded_starts=2, short_chain=20, long_chain=120, short_starts=3, long_starts=15
)


def on_gpus(problem: Problem) -> Protocol:
    """Returns the protocol for a problem on GPUs: `ON_GPUS`, with shorter chains where calls are long."""
    call_us = problem.flops_per_device / _ASSUMED_FLOPS_PER_S[problem.dtype] * 1e6
    long_chain = int(np.clip(_LONG_CHAIN_US / call_us, 6, ON_GPUS.long_chain))
    long_starts = int(np.clip(_LONG_CHAIN_US / call_us / ON_GPUS.operand_sets, 2, ON_GPUS.long_starts))
    return dataclasses.replace(
        ON_GPUS,
        recorded_starts=1 if call_us > _LONG_CALL_US else ON_GPUS.recorded_starts,
        short_chain=max(1, long_chain // 6),
        long_chain=long_chain,
        short_starts=max(1, long_starts // 5),
        long_starts=long_starts,
    )


# Simulated devices share the host's cores: chains would measure the scheduler, and their times mean nothing anyway.
ON_SIMULATED = Protocol(
    rounds=5, operand_sets=2, recorded_starts=0, short_chain=1, long_chain=2, short_starts=1, long_starts=2
)


def order_in_round(count: int, round_index: int) -> list[int]:
    """Returns in which order `count` methods are timed in a round.

    A method that follows one that heats the GPUs is at a disadvantage. Over `count` rounds, or twice as many if it is
    odd, each method has each place equally often, and follows each other one equally often; over other numbers of
    rounds nearly so (see `order_in_words`).

    Args:
      count: number of methods.
      round_index: number of the round, over all processes.

    Source: Williams, "Experimental designs balanced for the estimation of residual effects of treatments", 1949.
    """
    zigzag = [(place + 1) // 2 if place % 2 else (count - place // 2) % count for place in range(count)]
    order = [(place + round_index) % count for place in zigzag]
    return order[::-1] if count % 2 and round_index // count % 2 else order


def order_in_words(processes: Sequence[tuple[Sequence[str], Iterable[int]]]) -> str:
    """Returns how evenly methods follow each other, counted over the rounds of one or more processes.

    Args:
      processes: for each the names of the methods that it has timed, and the numbers of its rounds.
    """
    orders = [
        [names[place] for place in order_in_round(len(names), number)]
        for names, rounds in processes
        for number in rounds
    ]
    follows = Counter(pair for order in orders for pair in itertools.pairwise(order))
    counts = [follows[pair] for pair in itertools.permutations({name for order in orders for name in order}, 2)]
    words = "an order that changes by round"
    if not counts:
        return words
    often = f"{min(counts)} to {max(counts)} times" if min(counts) < max(counts) else f"{max(counts)} times"
    often = "once" if min(counts) == max(counts) == 1 else often
    return f"{words}: in {len(orders)} rounds each method follows each other one {often}"
