"""`python -m cmm.peers.counting_fault`: one late CTA, and JAX's example of a collective matmul gives wrong results.

At the end of each step of the ring, every CTA of the example signals its neighbour, and all signals of all steps count
up one semaphore. A device goes on to step i + 1 when the count says `(i + 1) * CTAs`. But a count does not say whose
signals these are: while one CTA is late with step i, its siblings finish step i + 1, and one of their signals stands in
for the one that is missing. The receiver then reads rows that have not arrived, and passes them on. It takes three
devices: with two, only one step sends, and there is nothing to mistake it for. One semaphore per step would be sound.
"""

import argparse
import dataclasses
import datetime
import functools
import json
import pathlib
import sys
import time

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cmm import devices
from cmm.cli import positive
from cmm.job import AXIS
from cmm.peers.counting_experiment import Setting, run_delay
from cmm.peers.jax_example import PUBLISHED_CONFIG, Config, load_example
from cmm.peers.late_cta import LATE_CTA, LATE_DEVICE
from cmm.provenance import machine, versions
from cmm.results import short_kind
from cmm.roofline import Problem

_SIMULATED_DEVICES, _SIMULATED_CTAS = 3, 2
_SIMULATED_CONFIG = Config(
    tile_m=64, tile_n=64, tile_k=64, max_concurrent_steps=2, grid_minor_dim="M", epi_tile_m=None, epi_tile_n=None
)
_GPU_DELAYS_US, _SIMULATED_DELAYS_US = (0, 50, 200, 1000), (0, 1, 10, 100)

_EPILOG = """\
Wrong results are what this looks for: the exit status is 0 if the run was completed, and 2 if it cannot run here.

On GPUs the shapes are 1024 x 4096 x 4096 per device in float16. It takes at least 3 Hopper GPUs, all that the process
sees; CUDA_VISIBLE_DEVICES hides some. Simulated devices get 128 x 128 x 128, two CTAs each, and look for races too.
"""


class _CannotRun(Exception):
    """Says why this machine or these options do not do."""


def main(arguments=None) -> int:
    """Runs the experiment; returns the exit status: 0 if it was completed, 2 if it cannot run here."""
    options = _parse(arguments)
    console = Console(width=None if sys.stdout.isatty() else 120)
    try:
        load_example()
        found = _find_devices(options)
    except (_CannotRun, ImportError, ValueError) as error:
        console.print(f"[red]{error}")
        return 2
    setting = _setting(found)
    delays_us = options.delays or (_SIMULATED_DELAYS_US if setting.simulated else _GPU_DELAYS_US)
    mesh = devices.ring_mesh(found, AXIS)
    record = _record(options, delays_us, mesh, setting)
    path = options.out or pathlib.Path("out", _file_name(record))
    _print_header(console, record, setting)
    results = _run_all(console, delays_us, options.repeats, mesh, setting, lambda found: _write(path, record, found))
    _print_table(console, results, record)
    console.print(f"wrote {path}", highlight=False)
    return 0


def _parse(arguments):
    parser = argparse.ArgumentParser(
        prog="python -m cmm.peers.counting_fault",
        description=__doc__.split("\n\n", 1)[1],
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--devices", type=positive, metavar="D", help="how many (default: all GPUs, or 3 simulated)")
    parser.add_argument("--simulate", action="store_true", help="use simulated CPU devices even where there are GPUs")
    parser.add_argument(
        "--delays",
        type=_delays,
        metavar="US[,US]",
        help="how long the CTA sleeps, in µs (default: 0,50,200,1000; simulated 0,1,10,100 of virtual time)",
    )
    parser.add_argument("--repeats", type=positive, default=12, help="calls per delay (default: 12)")
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE", help="default: out/counting_fault_KIND_dD.json")
    return parser.parse_args(arguments)


def _delays(text):
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be whole µs with commas between them, got {text}") from None
    if min(values) < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {min(values)}")
    return values


def _find_devices(options):
    found = devices.find_devices(options.devices, simulate=options.simulate)
    if devices.is_simulated(found):
        return found[: options.devices or _SIMULATED_DEVICES]
    kind = found[0].device_kind
    if not str(getattr(found[0], "compute_capability", "")).startswith("9."):
        raise _CannotRun(f"JAX's example runs on Hopper GPUs only, found {kind}. Try --simulate.")
    if len(found) < 3:
        raise _CannotRun(f"The fault needs at least 3 GPUs, got {len(found)} x {kind}. Try --simulate.")
    if len(found) != jax.device_count():
        raise _CannotRun(
            f"JAX's example works on all {jax.device_count()} GPUs that the process sees, not on {len(found)} of them. "
            "Hide the others with CUDA_VISIBLE_DEVICES."
        )
    return found


def _setting(found):
    if devices.is_simulated(found):
        return Setting(Problem(len(found), 128, 128, 128), _SIMULATED_CONFIG, _SIMULATED_CTAS, simulated=True)
    return Setting(Problem(len(found), 1024, 4096, 4096), PUBLISHED_CONFIG, found[0].core_count, simulated=False)


def _run_all(console, delays_us, repeats, mesh, setting, keep):
    results = []
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("starting", total=len(delays_us) * repeats)
        for index, delay_us in enumerate(delays_us):
            progress.update(task, description=f"delay {delay_us} µs")
            advance = functools.partial(progress.advance, task)
            start = time.monotonic()
            results.append(run_delay(delay_us, repeats, mesh, setting, index * repeats, advance))
            keep(results)  # Now: what follows may hang.
            r, took_s = results[-1], time.monotonic() - start
            progress.console.print(f"{delay_us} µs: {r.wrong_shards} of {r.shards} shards wrong ({took_s:.1f} s)")
    return results


def _record(options, delays_us, mesh, setting):
    """Returns all of the result file but the results."""
    count = setting.problem.axis_size
    arguments = f"--devices {count} --delays {','.join(map(str, delays_us))} --repeats {options.repeats}"
    return {
        "problem": dataclasses.asdict(setting.problem),
        "config": dataclasses.asdict(setting.config),
        "ctas_per_device": setting.ctas_per_device,
        "late": {"device": LATE_DEVICE, "cta": LATE_CTA, "step": 0},
        "block_rows": setting.config.cta_tile_m,
        "machine": machine(mesh),
        "versions": versions(),
        "simulated": setting.simulated,
        "distribution": "normal(0, 1)",
        "date": datetime.date.today().isoformat(),
        "command": f"python -m cmm.peers.counting_fault {arguments}" + " --simulate" * setting.simulated,
        "delays_us": list(delays_us),
        "wrong_block_fields": ["device", "source_shard", "row_block", "calls"],
    }


def _file_name(record):
    kind = short_kind(record["machine"]["device_kind"])
    kind = "simulated" if record["simulated"] else kind
    return f"counting_fault_{kind}_d{record['problem']['axis_size']}.json"


def _write(path, record, results):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record | {"results": [dataclasses.asdict(r) for r in results]}, indent=1) + "\n")


def _print_header(console, record, setting):
    p = setting.problem
    kind = "simulated CPU devices" if setting.simulated else f"x {record['machine']['device_kind']}"
    console.rule("JAX's example of a collective matmul with one late CTA")
    console.print(f"{p.axis_size} {kind}, {setting.ctas_per_device} CTAs each, JAX {jax.__version__}", highlight=False)
    console.print(
        f"{p.dtype}, per device A [{p.m_shard}, {p.k}] and B [{p.k}, {p.n_shard}]; "
        f"CTA {LATE_CTA} of device {LATE_DEVICE} sleeps at the start of step 0"
    )
    if setting.simulated:
        console.print("Simulated operations take random times, so now and then a CTA is late without a sleep.")
    tiles = setting.row_blocks * (p.n_shard // setting.config.cta_tile_n)
    if tiles > setting.ctas_per_device:
        console.print(
            f"[yellow]{tiles} tiles for {setting.ctas_per_device} CTAs: the example has another fault where a CTA has "
            "more than one tile, so wrong results here need not come from the late CTA."
        )


def _print_table(console, results, record):
    simulated = record["simulated"]
    table = Table(title="what a late CTA does", caption=f"float32 reference; {record['date']}")
    names = ("delay, µs", "wrong outputs", "wrong shards", "largest error", "not finite")
    for name in (*names, "calls with a race" if simulated else "call, µs"):
        table.add_column(name, justify="right")
    table.add_column(f"wrong blocks of {record['block_rows']} rows", overflow="fold")
    for r in results:
        call = "" if r.call_us is None else f"{r.call_us:.0f}"
        table.add_row(
            str(r.delay_us),
            f"{r.wrong_outputs} of {r.outputs}",
            f"{r.wrong_shards} of {r.shards}",
            f"{r.largest_error:.2g}",
            str(r.not_finite),
            f"{r.racy_calls} of {r.repeats}" if simulated else call,
            _places(r.wrong_blocks),
        )
    console.print(table)
    if race := next((r.race for r in results if r.race), ""):
        console.print(race, highlight=False, markup=False)


def _places(wrong_blocks):
    """Says which blocks of which shards were wrong, and on which devices."""
    found = {}
    for device, shard, block, _ in wrong_blocks:
        found.setdefault((shard, block), []).append(device)
    places = [
        f"block {block} of shard {shard} on device{'s' * (len(on) > 1)} {', '.join(map(str, on))}"
        for (shard, block), on in sorted(found.items())
    ]
    more = len(places) - 4
    return "; ".join(places[:4]) + (f"; and {more} more" if more > 0 else "")


if __name__ == "__main__":
    sys.exit(main())
