"""How are workers followed, one process per GPU, of which each may crash or hang?"""

import json
import multiprocessing
import multiprocessing.connection
import pathlib
import tempfile
import time
from collections.abc import Callable

from cmm.roofline import Problem

# Once they have begun with their programs, workers that go no further for so long hang.
_LONGEST_TURN_S = 60
_LOOK_EVERY_S = 1.0


class WorkerFailed(Exception):
    """Says which worker ended badly, and how.

    Attributes:
      program: name of the program that it was at, or `None` if it had not begun with one.
    """

    def __init__(self, reason: str, program: str | None):
        super().__init__(reason)
        self.program = program


def stage_file(folder: pathlib.Path, rank: int) -> pathlib.Path:
    """Returns where a worker notes what it does before its first turn."""
    return folder / f"rank{rank}.stage"


def run_workers(target: Callable, problem: Problem, timeout_s: float) -> list[dict]:
    """Runs `target(rank, problem, folder, meet)` once per GPU, each in a process, and returns what they wrote.

    Args:
      target: writes its report to `folder / f"rank{rank}.json"`, or what went wrong to `folder / f"rank{rank}.error"`;
        before it goes on to a program, number and name of this turn to `folder / f"rank{rank}.turn"`; before its first
        turn, what it does to `folder / f"rank{rank}.stage"`, if it likes. `meet` is a barrier of all workers.
      problem: shapes, dtype and number of workers.
      timeout_s: all workers are killed after so many seconds. Those that have had a turn are killed when the next one
        does not come for a minute, or for a quarter of this time if that is less.

    Raises:
      WorkerFailed: one of them crashed or hung. None of them runs any more.
    """
    # A CUDA context does not survive a fork.
    context = multiprocessing.get_context("spawn")
    meet = context.Barrier(problem.axis_size)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        workers = [
            context.Process(target=target, args=(rank, problem, folder, meet), daemon=True)
            for rank in range(problem.axis_size)
        ]
        try:
            for worker in workers:
                worker.start()
            _wait(workers, folder, timeout_s)
        finally:
            for worker in workers:
                if worker.is_alive():
                    worker.kill()
                    worker.join()
        return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(problem.axis_size)]


def _wait(workers, folder, timeout_s):
    began = changed = time.monotonic()
    longest_turn_s = min(_LONGEST_TURN_S, timeout_s / 4)
    turns = [(-1, None)] * len(workers)
    running = dict(enumerate(workers))
    while running:
        sentinels = [worker.sentinel for worker in running.values()]
        rest_s = max(0.0, began + timeout_s - time.monotonic())
        if multiprocessing.connection.wait(sentinels, min(rest_s, _LOOK_EVERY_S)):
            for rank in [rank for rank, worker in running.items() if not worker.is_alive()]:
                worker = running.pop(rank)
                worker.join()
                if worker.exitcode or not (folder / f"rank{rank}.json").exists():
                    raise _last_words(rank, worker.exitcode, folder, len(workers))
            continue
        now, now_at = time.monotonic(), [_turn(rank, folder) for rank in range(len(workers))]
        if now_at != turns:
            turns, changed = now_at, now
        begun = max(number for number, _ in turns) >= 0
        if begun and now - changed > longest_turn_s:
            raise _hang(running, folder, longest_turn_s)
        if now - began > timeout_s:
            raise _hang(running, folder, timeout_s)


def _hang(running, folder, waited_s):
    # One that hangs keeps those that wait for it from getting ahead by more than a turn.
    _, program = min((_turn(rank, folder) for rank in running), key=lambda turn: turn[0])
    ranks = ", ".join(map(str, running))
    at = program or _text(stage_file(folder, min(running)))
    reason = f"no answer from the workers of rank {ranks} within {waited_s:g} s; all were killed"
    return WorkerFailed(f"{reason}, at {at}" if at else reason, program)


def _last_words(rank, exit_code, folder, workers):
    errors = {r: path.read_text() for r in range(workers) if (path := folder / f"rank{r}.error").exists()}
    # The worker that failed first breaks the barrier for all: its own error says more than that of the others.
    own = {r: text for r, text in errors.items() if "BrokenBarrierError" not in text} or errors
    stage = _text(stage_file(folder, rank))
    reason = f"rank{rank} ended with exit code {exit_code} and no report" + (f", at {stage}" if stage else "")
    if own:
        rank, text = next(iter(own.items()))
        reason = f"rank{rank}: {text}"
    return WorkerFailed(reason, _turn(rank, folder)[1])


def _turn(rank, folder) -> tuple[int, str | None]:
    """Returns number and program of the turn that a worker was at; -1 and `None` before its first."""
    try:
        number, program = _text(folder / f"rank{rank}.turn").split()
        return int(number), program
    except ValueError:
        return -1, None


def _text(path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
