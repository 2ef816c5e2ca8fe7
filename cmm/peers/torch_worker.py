"""One GPU's part of `cmm.peers.torch_symm_mem`: check, capture and time PyTorch's programs. Needs PyTorch."""

import itertools
import json
import math
import multiprocessing.synchronize
import os
import pathlib
import time
import traceback
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

# Defines torch.ops.symm_mem.
import torch.distributed._symmetric_memory  # noqa: F401

from cmm.peers.torch_trace import GRAPH_CALLS, call_times_us, gpu_events, is_complete
from cmm.protocol import ON_GPUS
from cmm.recording import GpuEvent
from cmm.reference import error_bound
from cmm.roofline import Problem

LONG_REPLAYS = 5
_RECORDINGS = 3  # A recording that lacks events is made again.


def run(
    rank: int,
    problem: Problem,
    folder: pathlib.Path,
    meet: multiprocessing.synchronize.Barrier,
    programs: Sequence[str],
    rounds: int,
) -> None:
    """Measures `programs` on GPU `rank` and writes into `folder` what `torch_symm_mem.run_workers` reads."""
    try:
        report = _measure(rank, problem, folder, meet, programs, rounds)
        (folder / f"rank{rank}.json").write_text(json.dumps(report))
        meet.wait()
        status = 0
    except BaseException as error:
        (folder / f"rank{rank}.error").write_text(f"{type(error).__name__}: {error}")
        traceback.print_exc()
        meet.abort()
        status = 1
    # Captured graphs hold NCCL's communicator, and its orderly end may wait for ever. All that matters is written.
    os._exit(status)


def _measure(rank, problem, folder, meet, programs, rounds):
    stage = (folder / f"rank{rank}.stage").write_text
    stage("joining the other GPUs by NCCL")
    torch.cuda.set_device(rank)
    # float32 means float32, and sums of half-precision products are float32: as everywhere in this package.
    matmul = torch.backends.cuda.matmul
    matmul.allow_tf32 = False
    matmul.allow_fp16_reduced_precision_reduction = matmul.allow_bf16_reduced_precision_reduction = False
    store = dist.FileStore(str(folder / "store"), problem.axis_size)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=problem.axis_size, device_id=device)
    stage("drawing operands and computing references")
    calls, references = _programs(rank, problem)
    torch.cuda.synchronize()
    turns = itertools.count()

    def by_turns(names):
        """Yields the names, and notes before each whose turn it is: who crashes or hangs cannot tell any more."""
        for name in names:
            _replace(folder / f"rank{rank}.turn", f"{next(turns)} {name}")
            yield name

    errors = {name: _worst_errors(calls[name], references, problem) for name in by_turns(programs)}
    # The profiler attaches to the driver once, before there are graphs that it should see.
    _record(lambda: torch.zeros(1, device="cuda"), folder / f"trace{rank}.json", rank)
    graphs = {name: _capture(calls[name]) for name in by_turns(programs)}
    times = {name: {"call_us": [], "kernel_us": [], "wall_us": []} for name in programs}
    for name in by_turns(programs):
        meet.wait()
        graphs[name].replay()
        torch.cuda.synchronize()
    for _ in range(rounds):
        for name in by_turns(programs):
            times[name]["wall_us"].append(_wall_us(graphs[name], meet))
            call_us, kernel_us = _call_us(graphs[name], meet, folder / f"trace{rank}.json", rank)
            times[name]["call_us"].append(call_us)
            times[name]["kernel_us"].append(kernel_us)
    versions = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "device_kind": torch.cuda.get_device_name(rank),
    }
    return {
        "programs": {name: times[name] | errors[name] for name in times},
        "protocol": _protocol(rounds),
        "versions": versions,
    }


def _protocol(rounds) -> str:
    return (
        f"{rounds} rounds, programs interleaved, one process per GPU; a CUDA graph of {GRAPH_CALLS} calls that take "
        f"{ON_GPUS.operand_sets} distinct operand pairs in turn; call time: busy time of the slowest GPU, median over "
        f"the calls of one replay but the first; kernel time: matmul kernels alone, likewise; wall time: 1 and "
        f"{LONG_REPLAYS} replays, difference per call, slowest GPU; medians over rounds"
    )


def _replace(path, text):
    """Writes a file that another process may be reading."""
    temporary = path.with_suffix(".new")
    temporary.write_text(text)
    os.replace(temporary, path)


def _programs(rank, problem):
    """Returns the programs as functions of the index of an operand pair, and the reference and bound of each pair."""
    dtype, group = getattr(torch, problem.dtype), dist.group.WORLD.group_name
    generator = torch.Generator("cuda").manual_seed(rank)

    def draw(*shape):
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    lhs = [draw(problem.m_shard, problem.k) for _ in range(ON_GPUS.operand_sets)]
    rhs = [draw(problem.k, problem.n_shard) for _ in range(ON_GPUS.operand_sets)]

    def gather(shard):
        whole = shard.new_empty(problem.axis_size * problem.m_shard, problem.k)
        dist.all_gather_into_tensor(whole, shard)
        return whole

    gathered = [gather(shard) for shard in lhs]

    def fused(i):
        _, (out,) = torch.ops.symm_mem.fused_all_gather_matmul(lhs[i], [rhs[i]], 0, group, return_A=False)
        return out

    calls = {
        "torch_gemm_only": lambda i: gathered[i] @ rhs[i],
        "torch_nccl": lambda i: gather(lhs[i]) @ rhs[i],
        "torch_symm_mem": fused,
    }
    return calls, [_reference(*pair, problem) for pair in zip(gathered, rhs, strict=True)]


def _reference(lhs, rhs, problem):
    lhs32, rhs32 = lhs.float(), rhs.float()
    reference = lhs32 @ rhs32
    return reference, error_bound(reference, lhs32.abs() @ rhs32.abs(), problem.k, problem.dtype)


def _worst_errors(call: Callable, references, problem):
    """Calls the program once per operand pair and compares the results with the references."""
    over_bound, relative = 0.0, 0.0
    for i, (reference, bound) in enumerate(references):
        error = (call(i).float() - reference).abs()
        over_bound = max(over_bound, _finite((error / bound).max()))
        relative = max(relative, _finite(error.norm() / reference.norm()))
    return {"error_over_bound": over_bound, "relative_error": relative}


def _finite(value):
    value = float(value)
    return value if math.isfinite(value) else math.inf


def _capture(call):
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog queries events from a thread of its own meanwhile, which the stricter modes forbid.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for i in range(GRAPH_CALLS):
            call(i % ON_GPUS.operand_sets)
    torch.cuda.synchronize()
    return graph


def _wall_us(graph, meet):
    difference_us = _replays_us(graph, LONG_REPLAYS, meet) - _replays_us(graph, 1, meet)
    return difference_us / ((LONG_REPLAYS - 1) * GRAPH_CALLS)


def _replays_us(graph, replays, meet):
    meet.wait()
    began = time.perf_counter()
    for _ in range(replays):
        graph.replay()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) * 1e6


def _call_us(graph, meet, path, rank):
    """Returns the busy time and the kernel time of one call, medians over the calls of one replay but the first."""

    def replay():
        meet.wait()
        graph.replay()

    # Every worker records equally often: they meet at the start of each replay.
    recordings = [_record(replay, path, rank)]
    complete = _all_complete(is_complete(recordings[-1]), path.parent, rank, meet)
    while not complete and len(recordings) < _RECORDINGS:
        recordings.append(_record(replay, path, rank))
        complete = _all_complete(is_complete(recordings[-1]), path.parent, rank, meet)
    return call_times_us(recordings[-1], rank)


def _all_complete(mine, folder, rank, meet) -> bool:
    """Whether the recordings of all workers are complete; all get the same answer."""
    (folder / f"rank{rank}.complete").write_text(str(int(mine)))
    meet.wait()
    found = all(path.read_text() == "1" for path in folder.glob("rank*.complete"))
    meet.wait()
    return found


def _record(run, path, rank) -> list[GpuEvent]:
    """Runs `run` under PyTorch's profiler and returns every kernel and copy, in order of their start."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    profile.export_chrome_trace(str(path))
    return gpu_events(json.loads(path.read_text()), rank)
