"""Workers of a peer, one for each GPU: they report by rank, and one that fails ends all."""

import json
import os
import signal
import sys
import time

import pytest

from cmm.peers import workers
from cmm.roofline import Problem

TWO = Problem(2, 32, 64, 64, "float16")


def _worker(rank, problem, folder, meet):
    meet.wait(30)
    (folder / f"rank{rank}.json").write_text(json.dumps({"rank": rank, "k": problem.k}))


def _worker_that_breaks(rank, problem, folder, meet):
    try:
        if rank == 1:
            raise ValueError("no link")
        meet.wait(30)
    except Exception as error:
        (folder / f"rank{rank}.error").write_text(f"{type(error).__name__}: {error}")
        meet.abort()
        sys.exit(1)


def _worker_that_dies(rank, problem, folder, meet):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    meet.wait()


def _worker_that_hangs(rank, problem, folder, meet):
    workers.stage_file(folder, rank).write_text("importing PyTorch")
    if rank == 0:
        (folder / "rank0.json").write_text("{}")
    else:
        time.sleep(60)


def test_workers_report_in_order_of_rank():
    assert workers.run_workers(_worker, TWO, 60) == [{"rank": 0, "k": 64}, {"rank": 1, "k": 64}]


@pytest.mark.parametrize(
    "target, timeout_s, words",
    [
        (_worker_that_breaks, 60, "^rank1: ValueError: no link$"),
        (_worker_that_dies, 60, "^rank1 ended with exit code -9"),
        (
            _worker_that_hangs,
            3,
            "no answer from the workers of rank (0, )?1 within 3 s; all were killed(, at importing PyTorch)?$",
        ),
    ],
)
def test_a_worker_that_fails_ends_all(target, timeout_s, words):
    began = time.monotonic()
    with pytest.raises(workers.WorkerFailed, match=words):
        workers.run_workers(target, TWO, timeout_s)
    assert time.monotonic() - began < 40
