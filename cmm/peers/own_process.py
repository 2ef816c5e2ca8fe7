"""How is a peer run that needs a process of its own, and what does it report?

A peer may want flags for the whole process, one process per GPU, or a library that this process must not load. It is a
module with a command line: `python -m MODULE --devices D --m-shard M --k K --n-shard N --dtype T --json PATH`, to name
the most important options (see `add_options`).
"""

import argparse
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from cmm.cli import positive
from cmm.protocol import ON_GPUS
from cmm.results import MethodResult, Spread
from cmm.roofline import ITEMSIZE_BYTES, Problem

_STDERR_LINES, _STDERR_CHARACTERS = 8, 800
# A peer ends its own workers before this process ends the peer: then it can still say which one hung.
_SHARE_FOR_PEER = 0.9


@dataclasses.dataclass(frozen=True)
class PeerResult(MethodResult):
    """What one program of a peer did. Ratios are to the peer's own GEMM only, in the same round and process.

    Attributes:
      status: as in `MethodResult`, or "failed": it began, and crashed, hung or was wrong; `reason` says which.
      rewritten: whether XLA replaced the all-gather by a ring; `None` where there is nothing to rewrite.
      options: compiler options or environment variables that make the program what it is.
      protocol: how times were taken, in words.
      versions: versions of the libraries that decide on results and times.
    """

    rewritten: bool | None = None
    options: dict[str, str | int | bool] = dataclasses.field(default_factory=dict)
    protocol: str = ""
    versions: dict[str, str] = dataclasses.field(default_factory=dict)


_SPREADS = tuple(field.name for field in dataclasses.fields(PeerResult) if field.type == Spread | None)


def to_json(results: Sequence[PeerResult]) -> str:
    """Returns the results as one line of JSON."""
    return json.dumps([dataclasses.asdict(result) for result in results])


def from_json(text: str) -> list[PeerResult]:
    """Reads what `to_json` wrote.

    Raises:
      ValueError: the text is something else.
    """
    try:
        return [
            PeerResult(**(raw | {name: Spread(**raw[name]) for name in _SPREADS if raw.get(name) is not None}))
            for raw in json.loads(text)
        ]
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"This is no list of peer results: {error}.") from error


def report(results: Sequence[PeerResult], path: pathlib.Path | None) -> None:
    """Writes the results to `path`, or prints them where there is none."""
    if path is None:
        print(to_json(results))
    else:
        path.write_text(to_json(results) + "\n")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that all peers take."""
    parser.add_argument("--devices", type=positive, required=True, metavar="D", help="how many")
    parser.add_argument("--m-shard", type=positive, required=True, help="rows of A per device")
    parser.add_argument("--k", type=positive, required=True, help="contraction size")
    parser.add_argument("--n-shard", type=positive, required=True, help="columns of B per device")
    parser.add_argument("--dtype", choices=tuple(ITEMSIZE_BYTES), default="float16", help="default: float16")
    parser.add_argument("--simulate", action="store_true", help="use simulated CPU devices even where there are GPUs")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="seconds for all (default: 600)")
    parser.add_argument(
        "--rounds", type=positive, default=ON_GPUS.rounds, metavar="N", help="rounds on GPUs (default: %(default)s)"
    )
    parser.add_argument("--json", type=pathlib.Path, metavar="PATH", help="result file (default: print one line)")


def problem_of(options: argparse.Namespace) -> Problem:
    """Returns the problem that the options of `add_options` describe."""
    return Problem(options.devices, options.m_shard, options.k, options.n_shard, options.dtype)


def run_peer(
    module: str,
    problem: Problem,
    timeout_s: float,
    *,
    simulate: bool = False,
    arguments: Sequence[str] = (),
    own_group: bool = True,
) -> list[PeerResult]:
    """Runs a peer as a subprocess and returns what it reports. A peer that fails raises nothing here.

    Call it before this process starts JAX on GPUs: JAX reserves most of their memory, and the peer needs it.

    Args:
      module: name of the peer's module, "cmm.peers.xla_rewrite" for instance.
      problem: shapes, dtype and number of devices.
      timeout_s: the peer and all that it started are killed after so many seconds.
      simulate: use simulated devices even where there are GPUs.
      arguments: further arguments for the module.
      own_group: whether the peer gets a process group of its own. A peer that runs its parts by this function says no:
        whoever kills it then kills them too.

    Returns:
      The peer's results. One result of status "failed" if it crashed, hung or reported nothing. Whatever failed has the
      last lines of the peer's standard error in its reason: it may be all that a library has said.
    """
    name = module.rpartition(".")[2]
    p = problem
    with tempfile.TemporaryDirectory() as folder:
        path, stderr_path = pathlib.Path(folder, "peer.json"), pathlib.Path(folder, "stderr")
        shape = f"--devices {p.axis_size} --m-shard {p.m_shard} --k {p.k} --n-shard {p.n_shard} --dtype {p.dtype}"
        limit = f"--timeout {_SHARE_FOR_PEER * timeout_s}"
        command = [sys.executable, "-m", module, *shape.split(), *limit.split(), "--json", str(path), *arguments]
        command += ["--simulate"] * simulate
        # Standard error goes to a file: a pipe would stay open as long as any process that the peer started.
        with stderr_path.open("w") as stderr:
            ended = _run(command, stderr, timeout_s, own_group)
        last = _last_lines(stderr_path)
        try:
            found = from_json(path.read_text())
        except (OSError, ValueError):
            return [PeerResult(name, name, "failed", f"{ended}: {last}" if last else ended)]
    return [_with_last_words(result, last) for result in found]


def _last_lines(path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines()
    return " | ".join(lines[-_STDERR_LINES:])[-_STDERR_CHARACTERS:]


def _with_last_words(result, last) -> PeerResult:
    if result.status != "failed" or not last or last in result.reason:
        return result
    return dataclasses.replace(result, reason=f"{result.reason}; standard error: {last}")


def _run(command, stderr, timeout_s, own_group) -> str:
    """Runs the command and returns how it ended. Neither it nor, in a group of its own, its children outlive this."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        process_group=0 if own_group else None,
    )
    try:
        return f"ended with exit status {process.wait(timeout_s)}"
    except subprocess.TimeoutExpired:
        return f"killed after {timeout_s:g} s"
    finally:
        try:
            if own_group:
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()
        except ProcessLookupError:
            pass
        process.wait()
