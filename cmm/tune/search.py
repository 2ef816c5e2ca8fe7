"""Which configuration of a kernel is the fastest for a problem? Try many shortly, and the best of them thoroughly."""

import dataclasses
import functools
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
from jax.sharding import Mesh, PartitionSpec as P

from cmm.chain import chained
from cmm.devices import random_operands
from cmm.recording import record
from cmm.reference import Accuracy, accuracy
from cmm.roofline import Problem
from cmm.tune.halving import Trial, successive_halving
from cmm.tune.tunable import Tunable

# Calls of a candidate are chained in one program, on so many operand pairs, and the program is started so often.
CHAINED_CALLS = 6
SCREENING_STARTS, FINAL_STARTS = 1, 2
_BATCH = 16
_RECORDINGS = 3  # A recording that lacks events is made again.
# Lowering is Python and runs in one thread, beside it XLA compiles. jaxlib compiles Mosaic kernels under one lock, so
# more threads would only wait for it.
_COMPILING_THREADS = 6

# Called with what is being done and the fraction of the whole search that is done, 0 to 1.
Report = Callable[[str, float], None]
# Returns the kernel time in microseconds of each program: `(programs, operand pairs, starts of each program)`.
Timer = Callable[[Sequence[Callable], Sequence, int], Sequence[float]]


@dataclasses.dataclass
class Candidate:
    """A configuration, its program of all operand pairs, and how right that is once it was checked."""

    config: object
    program: Callable
    accuracy: Accuracy | None = None


@dataclasses.dataclass(frozen=True)
class Search:
    """The outcome of a search.

    Attributes:
      trials: finalists from the fastest to the slowest, then the others.
      skipped: configurations that do not fit, and the reasons.
      considered: number of configurations that there were to try.
      stopped: whether it was stopped before all were tried in all rounds.
    """

    trials: list[Trial[Candidate]]
    skipped: list[tuple[object, str]]
    considered: int
    stopped: bool

    @property
    def finalists(self) -> list[Trial[Candidate]]:
        """The best, the winner first; empty if no candidate fits or none is right."""
        return [trial for trial in self.trials if trial.rounds_us]


def kernel_times_us(programs: Sequence[Callable], operands: Sequence, starts: int) -> list[float]:
    """Times the kernels of programs alone, all in one recording.

    Args:
      programs: compiled chains of calls (see `cmm.chain`) that have run before; all run equally many kernels per call.
      operands: operand pairs, one for each call of a chain.
      starts: how often each program is started.

    Returns:
      For each program the time of its matmul kernels: per GPU the median over calls, then the slowest GPU's.

    Raises:
      RuntimeError: the numbers of recorded kernels and of calls do not go together.
    """

    def run():
        for program in programs:
            for _ in range(starts):
                result = program(operands)
        return result  # GPUs work in order: this is the last to be finished, and keeping all may not fit into memory.

    calls = starts * len(operands)
    for _ in range(_RECORDINGS):
        durations_us: dict[int, list[float]] = {}
        for event in record(run):
            if event.role == "matmul":
                durations_us.setdefault(event.device, []).append(event.end_us - event.start_us)
        counts = {device: len(found) for device, found in durations_us.items()}
        if counts and all(count % (len(programs) * calls) == 0 for count in counts.values()):
            return [max(times) for times in zip(*(_medians(t, len(programs), calls) for t in durations_us.values()))]
    raise RuntimeError(
        f"The profiler recorded {counts or 'no'} matmul kernels by GPU, for {len(programs) * calls} calls. CUPTI "
        "allows one profiler at a time: is another one attached?"
    )


def _medians(durations_us, programs, calls) -> list[float]:
    """Returns for each program the median time of a call on one GPU, from its kernels in order of their start."""
    per_call_us = [sum(call) for call in itertools.batched(durations_us, len(durations_us) // (programs * calls))]
    return [statistics.median(chain) for chain in itertools.batched(per_call_us, calls)]


def search(
    problem: Problem,
    kernel: Tunable,
    mesh: Mesh,
    configs: Sequence,
    rounds: int,
    report: Report = lambda what, done: None,
    stop: Callable[[], bool] = lambda: False,
    timer: Timer = kernel_times_us,
) -> Search:
    """Finds the fastest of `configs` for `problem`.

    Args:
      problem: shapes and dtype; `axis_size` is the size of the mesh.
      kernel: the kernel.
      mesh: a mesh of one axis.
      configs: what to try, the most promising first.
      rounds: how often the best quarter is timed.
      report: called as the work goes on.
      stop: asked now and then whether to stop; then the best of those that were tried wins. One is always tried.
      timer: times compiled programs.
    """
    axis_name = mesh.axis_names[0]
    report("drawing operands", 0.0)
    operands = [random_operands(problem, mesh, seed, axis_name) for seed in range(CHAINED_CALLS)]
    skipped: list[tuple[object, str]] = []

    def approve(candidate: Candidate) -> bool:
        report("checking the best", 0.8)
        results = candidate.program(operands)
        checks = [accuracy(out, *pair, mesh, axis_name) for out, pair in zip(results, operands, strict=True)]
        candidate.accuracy = Accuracy(
            max(check.error_over_bound for check in checks),
            max(check.relative_error for check in checks),
            checks[0].limit,
        )
        return candidate.accuracy.right or not kernel.must_be_right

    def time_us(starts, candidates):
        return timer([candidate.program for candidate in candidates], operands, starts)

    started_rounds = itertools.count()

    def compare_us(candidates):
        index = next(started_rounds)
        report(f"comparing the best {len(candidates)}, round {index + 1} of {rounds}", 0.85 + 0.15 * index / rounds)
        return time_us(FINAL_STARTS, candidates)

    trials = successive_halving(
        _batches(kernel, mesh, operands, configs, skipped, report, stop),
        functools.partial(time_us, SCREENING_STARTS),
        compare_us,
        approve,
        rounds,
        stop,
    )
    report("done", 1.0)
    stopped = len(trials) + len(skipped) < len(configs) or any(0 < len(trial.rounds_us) < rounds for trial in trials)
    return Search(trials, skipped, len(configs), stopped)


def _batches(kernel, mesh, operands, configs, skipped, report, stop) -> Iterator[list[Candidate]]:
    """Yields what compiles, in batches that have run once. Adds what does not to `skipped`."""
    done = 0
    with ThreadPoolExecutor(_COMPILING_THREADS) as pool:
        for batch in itertools.batched(configs, _BATCH):
            compiling = []
            for config in batch:
                # When time is up, what is being compiled already is still tried.
                if stop() and (compiling or done):
                    break
                try:
                    lowered = _program(kernel, mesh, config).lower(operands)
                except Exception as error:  # Compilers refuse in many ways; others may well fit.
                    skipped.append((config, f"{type(error).__name__}: {error}"))
                else:
                    compiling.append((config, pool.submit(lowered.compile)))
            ready = []
            for config, future in compiling:
                report(f"compiling and trying {len(configs)} configurations", 0.8 * done / len(configs))
                done += 1
                try:
                    ready.append(Candidate(config, future.result()))
                except Exception as error:
                    skipped.append((config, f"{type(error).__name__}: {error}"))
            for candidate in ready:
                jax.block_until_ready(candidate.program(operands))
            if ready:
                yield ready
            if stop() and done:
                return


def _program(kernel, mesh, config):
    axis_name = mesh.axis_names[0]
    rows, columns = P(axis_name, None), P(None, axis_name)
    return jax.jit(
        jax.shard_map(
            chained(lambda lhs, rhs: kernel.function(lhs, rhs, axis_name, config=config)),
            mesh=mesh,
            in_specs=([(rows, columns)] * CHAINED_CALLS,),
            out_specs=[columns] * CHAINED_CALLS,
            check_vma=kernel.check_vma,
        )
    )
