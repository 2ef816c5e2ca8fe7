"""What does each device do in the readable ring kernel, use by use? From events that `cmm.interpret` records.

All devices are simulated with equal durations, so they do the same at the same time, each with another shard.
"""

import dataclasses
import functools
import re
from collections.abc import Sequence

import jax
from jax.sharding import PartitionSpec as P

from cmm import devices
from cmm.hopper import TuningConfig, all_gather_lhs_matmul
from cmm.interpret import Event, simulate
from cmm.roofline import Problem
from cmm.schedule import shard_at

# Two by two tiles of the result in each step, and two products for each.
PROBLEM = Problem(axis_size=4, m_shard=256, k=128, n_shard=128, dtype="float16")
CONFIG = TuningConfig(tile_m=64, tile_n=64, tile_k=64, max_concurrent_steps=3)
M_TILES, N_TILES = PROBLEM.m_shard // CONFIG.cta_tile_m, PROBLEM.n_shard // CONFIG.cta_tile_n
K_STEPS = PROBLEM.k // CONFIG.tile_k


def record_kernel() -> list[Event]:
    """Runs `all_gather_lhs_matmul` on four simulated devices of one CTA each, and returns its events.

    Raises:
      RuntimeError: JAX started its backend before, with fewer than four simulated devices.
    """
    mesh = devices.ring_mesh(devices.simulated_devices(PROBLEM.axis_size))
    lhs, rhs = devices.random_operands(PROBLEM, mesh, seed=0)
    kernel = functools.partial(all_gather_lhs_matmul, axis_name="x", config=CONFIG)
    program = jax.jit(jax.shard_map(kernel, mesh=mesh, in_specs=(P("x"), P(None, "x")), out_specs=P(None, "x")))
    with simulate(core_count=1) as sim:
        sim.run(program, lhs, rhs)
    return sim.events


@dataclasses.dataclass(frozen=True)
class Use:
    """One use of a stage: a tile of A comes in by TMA, is multiplied, and on the visits of column 0 is sent.

    Attributes:
      step: of the ring.
      shard: whose tile it is.
      m, k: place of the tile of A within its shard.
      n: column of the tile of the result.
      load_ns, product_ns: begin and end; of the products that of the first multiplier and of the last one.
      turn_ns: begin of the product of the multiplier that sends.
      send_ns: begin of the send, and when it has landed; `None` if this tile is not sent now.
    """

    step: int
    shard: int
    m: int
    k: int
    n: int
    load_ns: tuple[int, int]
    product_ns: tuple[int, int]
    turn_ns: int
    send_ns: tuple[int, int] | None


@dataclasses.dataclass(frozen=True)
class Device:
    """One device's part of the recording; times in simulated nanoseconds.

    Attributes:
      uses: in order.
      stored_ns: row and column of a tile of the result -> when all of it is stored.
      signals_ns: for each slot, when this device signalled its neighbour.
      waits_ns: for each slot, when the loader's wait for it ended.
    """

    uses: tuple[Use, ...]
    stored_ns: dict[tuple[int, int], int]
    signals_ns: tuple[tuple[int, ...], ...]
    waits_ns: tuple[int, ...]


def devices_of(events: Sequence[Event]) -> list[Device]:
    """Returns what each device did, from the events of `record_kernel`.

    Raises:
      ValueError: devices did not act alike, so one text cannot say what all of them do.
    """
    found = [_device([e for e in events if e.device == d], d) for d in range(PROBLEM.axis_size)]
    if any(_times(device) != _times(found[0]) for device in found):
        raise ValueError("The devices did not act at the same times. Simulate them without a seed and without delays.")
    return found


def _times(device: Device):
    uses = [(use.load_ns, use.product_ns, use.turn_ns, use.send_ns) for use in device.uses]
    return uses, sorted(device.stored_ns.values()), device.signals_ns, device.waits_ns


def _device(events, device: int) -> Device:
    kinds = {kind: [e for e in events if e.kind == kind] for kind in ("load", "send", "store", "signal", "wait")}
    loads = sorted(kinds["load"], key=lambda e: (e.start_s, e.index))
    products = [
        sorted((e for e in events if e.kind == "tile_product" and e.thread == thread), key=lambda e: e.start_s)
        for thread in (0, 1)
    ]
    sends = sorted(kinds["send"], key=lambda e: e.start_s)
    uses = []
    for b, a, *both in zip(loads[::2], loads[1::2], *products, strict=True):
        begins = [begin for begin, _ in a.region]
        if len(begins) > 2:  # A slot: `cmm.hopper.slots`.
            step, m, k = begins[0] + 1, *begins[1:3]
        else:
            step, m, k = 0, begins[0] // CONFIG.cta_tile_m, begins[1] // CONFIG.tile_k
        n = b.region[1][0] // CONFIG.cta_tile_n
        is_sent = n == 0 and step < PROBLEM.axis_size - 1
        times = (_span(b, a), _span(*both), to_ns(both[0].start_s), _span(sends.pop(0)) if is_sent else None)
        uses.append(Use(step, shard_at(device, step, PROBLEM.axis_size), m, k, n, *times))
    stored: dict[tuple[int, int], int] = {}
    for e in kinds["store"]:
        tile = tuple(part[0] // size for part, size in zip(e.region, (CONFIG.cta_tile_m, CONFIG.cta_tile_n)))
        stored[tile] = max(stored.get(tile, 0), to_ns(e.end_s))
    slot_of = lambda e: int(re.search(r"\[(\d+)\]", e.name)[1])
    signals = [sorted(to_ns(e.end_s) for e in kinds["signal"] if slot_of(e) == slot) for slot in slots()]
    waits = [max(to_ns(e.end_s) for e in kinds["wait"] if slot_of(e) == slot) for slot in slots()]
    return Device(tuple(uses), stored, tuple(map(tuple, signals)), tuple(waits))


def slots() -> range:
    """Returns the numbers of the slots of the scratch buffer."""
    return range(PROBLEM.axis_size - 1)


def to_ns(time_s: float) -> int:
    """Returns a simulated time in whole nanoseconds, which compare exactly."""
    return round(1e9 * time_s)


def _span(*events) -> tuple[int, int]:
    return min(to_ns(e.start_s) for e in events), max(to_ns(e.end_s) for e in events)
