"""Which options does `python -m cmm.bench` take, what does it measure then, and which command repeats it?"""

import argparse
import functools
import pathlib

from cmm.bench import peers
from cmm.bench.child import Plan
from cmm.cli import positive
from cmm.protocol import ON_SIMULATED
from cmm.roofline import ITEMSIZE_BYTES
from cmm.rungs import CHOICES
from cmm.suites import SUITES

_DESCRIPTION = """\
Measures every method on suites of problems, in several processes one after the other. In a process, methods are
interleaved by round, and all its problems follow each other. Each result is checked against a float32 reference first.
Medians and ratios are taken over the rounds of all processes. A result file is written for each problem as soon as a
process has measured it; `--out figures/data` puts it where `make figures` finds it.
"""
_EPILOG = """\
examples:
  python -m cmm.bench                                        suite W1, all GPUs, 3 processes
  python -m cmm.bench --suite m-sweep --quick --limit-s 500  a look at ten sizes
  python -m cmm.bench --m-shard 512 --k 8192 --n-shard 7168 --dtype bfloat16 --peers
  python -m cmm.bench --suite llama3-8b,llama3-70b --out figures/data
  python -m cmm.bench --devices 2 --peers-only --out figures/data
"""
_PROCESSES, _ROUNDS, _QUICK_ROUNDS, _SIMULATED_PROCESSES = 3, 8, 5, 2


def parse(arguments=None) -> argparse.Namespace:
    """Reads the command line, with defaults where it says nothing."""
    parser = argparse.ArgumentParser(
        prog="python -m cmm.bench",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    known = functools.partial(_names, known=tuple(SUITES)), functools.partial(_names, known=CHOICES)
    add("--suite", type=known[0], metavar="NAME[,NAME]", help=f"of {', '.join(SUITES)} (default: W1)")
    add("--m-shard", type=positive, help="rows of A per device: one shape, in place of a suite")
    add("--k", type=positive, help="contraction size (default: 4096)")
    add("--n-shard", type=positive, help="columns of B per device (default: 4096)")
    add("--dtype", choices=tuple(ITEMSIZE_BYTES), help="default: those of the suite; of one shape float16")
    add("--devices", type=positive, metavar="D", help="how many GPUs (default: all)")
    add("--methods", type=known[1], metavar="NAME[,NAME]", help=f"of {', '.join(CHOICES)} (default: all)")
    add(
        "--peers",
        type=functools.partial(_names, known=tuple(peers.MODULES)),
        nargs="?",
        const=tuple(peers.MODULES),
        default=(),
        metavar="NAME[,NAME]",
        help=f"measure programs of others afterwards, too, of {', '.join(peers.MODULES)} (without a name: both)",
    )
    add("--peers-only", action="store_true", help="measure peers alone, and add them to the records that are in --out")
    add("--peer-timeout-s", type=positive, default=peers.LONGEST_S, metavar="S", help="default: %(default)s")
    add("--processes", type=positive, metavar="N", help=f"default: {_PROCESSES}")
    add("--rounds", type=positive, metavar="N", help=f"in each process (default: {_ROUNDS})")
    add("--quick", action="store_true", help=f"one process, {_QUICK_ROUNDS} rounds: a look, no basis for comparisons")
    add("--limit-s", type=positive, metavar="S", help="begin no further problem after S seconds; keep what is there")
    add("--timeout-s", type=positive, default=180, metavar="S", help="kill a process silent for S s (default: 180)")
    add("--simulate", action="store_true", help="simulated CPU devices and tiny problems: tries it, measures nothing")
    add("--out", type=pathlib.Path, default=pathlib.Path("out"), help="output folder (default: out)")
    options = parser.parse_args(arguments)
    if options.suite and (options.m_shard or options.k or options.n_shard):
        parser.error("--suite has its own shapes: leave out --m-shard, --k and --n-shard")
    if options.quick and options.processes:
        parser.error("--quick is one process: leave out --processes")
    if options.peers_only and not options.devices:
        parser.error("--peers-only needs --devices, to know the problems without starting JAX here")
    if options.peers_only and options.methods:
        parser.error("--peers-only measures no methods: leave out --methods")
    options.peers = options.peers or tuple(peers.MODULES) * options.peers_only
    processes = _SIMULATED_PROCESSES if options.simulate else _PROCESSES
    options.processes = 1 if options.quick else options.processes or processes
    rounds = ON_SIMULATED.rounds if options.simulate else _ROUNDS
    options.rounds = options.rounds or min(rounds, _QUICK_ROUNDS if options.quick else rounds)
    return options


def _names(text, known):
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    return names


def plan_of(options: argparse.Namespace, folder: str, until: float | None) -> Plan:
    """Returns what the options ask for; `folder` and `until` are as in `Plan`."""
    one_shape = options.m_shard or options.k or options.n_shard
    shape = (options.m_shard or 1024, options.k or 4096, options.n_shard or 4096) if one_shape else ()
    return Plan(
        folder=folder,
        suites=() if one_shape else options.suite or ("W1",),
        shape=shape,
        dtype=options.dtype,
        devices=options.devices,
        methods=options.methods,
        rounds=options.rounds,
        simulate=options.simulate,
        until=until,
    )


def command_of(options: argparse.Namespace, plan: Plan, axis_size: int) -> str:
    """Returns the command that repeats the benchmark on so many devices, with every default written out."""
    names = ("m-shard", "k", "n-shard")
    shape = " ".join(f"--{name} {size}" for name, size in zip(names, plan.shape)) or f"--suite {','.join(plan.suites)}"
    words = [f"python -m cmm.bench {shape}", f"--dtype {options.dtype}" * bool(options.dtype), f"--devices {axis_size}"]
    if options.peers_only:
        words.append("--peers-only" + " --quick" * options.quick)
    else:
        words.append(f"--methods {','.join(options.methods or CHOICES)}")
        words.append("--quick" if options.quick else f"--processes {options.processes}")
    words.append(f"--rounds {options.rounds}")
    words.append(f"--peers {','.join(options.peers)}" if options.peers else "")
    words.append("--simulate" * options.simulate)
    return " ".join(filter(None, words))
