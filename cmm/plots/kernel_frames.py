"""Which pictures show the readable ring kernel at work? One for each event that a reader should see, and its words.

The frames keep the order of events and nothing else of their times.
"""

import dataclasses
import itertools
from collections.abc import Sequence

from cmm.interpret import Event
from cmm.plots.kernel_uses import CONFIG, K_STEPS, M_TILES, N_TILES, PROBLEM, Device, Use, devices_of, slots, to_ns
from cmm.schedule import neighbour

STATES = "empty", "at work", "done"

# The first step is the slowest to follow, later ones repeat it.
_STEP_MS = (1000, 650, 420, 420)
_BEGIN_MS, _END_MS = 2500, 4000


@dataclasses.dataclass(frozen=True)
class StageState:
    """What is in a stage: the use that it serves, and in words what happens to it."""

    use: Use
    loading: bool
    multiplying: bool
    sending: bool

    def words(self, now_ns: int) -> str:
        if self.multiplying:
            return "multiply\nsend" if self.sending else "multiply"
        if self.sending:
            return "send"
        return "load" if self.loading else "ready" if now_ns < self.use.product_ns[0] else "done"


@dataclasses.dataclass(frozen=True)
class DeviceState:
    """One device at one moment.

    Attributes:
      step: of the ring, that of the tile that is multiplied.
      stages: for each stage the state, `None` before its first use.
      words: for each stage what happens to it.
      slots: for each slot and tile `(m, k)`, row by row, one of `STATES`; "at work" is on its way.
      received: for each slot the value of its semaphore.
      tiles: for each tile of the result, row by row, one of `STATES`.
    """

    step: int
    stages: tuple[StageState | None, ...]
    words: tuple[str, ...]
    slots: tuple[tuple[str, ...], ...]
    received: tuple[int, ...]
    tiles: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Frame:
    """One picture: what has just happened, how long it is shown, and every device.

    Attributes:
      text: a heading and a sentence, one line each.
      duration_ms: chosen for readers.
      focus: the stage or the slot that the text is about, as ("stage", number) or ("slot", number).
      devices: one state for each device.
    """

    text: str
    duration_ms: int
    focus: tuple[str, int] | None
    devices: tuple[DeviceState, ...]


def state_at(found: Sequence[Device], device: int, now_ns: int) -> DeviceState:
    """Returns what device number `device` looks like at one moment."""
    me = found[device]
    runs = lambda span: span is not None and span[0] <= now_ns < span[1]
    state = lambda begin, end: STATES[(begin <= now_ns) + (end <= now_ns)]
    stages = []
    for stage in range(CONFIG.max_concurrent_steps):
        begun = [use for use in me.uses[stage :: CONFIG.max_concurrent_steps] if use.load_ns[0] <= now_ns]
        use = begun[-1] if begun else None
        stages.append(use and StageState(use, *map(runs, (use.load_ns, use.product_ns, use.send_ns))))
    # Who has this device as its neighbour fills its slots.
    above = next(d for d in range(len(found)) if neighbour(d, len(found)) == device)
    cells = [["empty"] * (M_TILES * K_STEPS) for _ in slots()]
    for use in (use for use in found[above].uses if use.send_ns):
        cells[use.step][use.m * K_STEPS + use.k] = state(*use.send_ns)
    begin_of_tile = {(use.shard * M_TILES + use.m, use.n): use.product_ns[0] for use in reversed(me.uses)}
    rows = range(PROBLEM.axis_size * M_TILES)
    tiles = [state(begin_of_tile[tile], me.stored_ns[tile]) for tile in itertools.product(rows, range(N_TILES))]
    return DeviceState(
        step=max((use.step for use in me.uses if use.turn_ns <= now_ns), default=0),
        stages=tuple(stages),
        words=tuple(stage.words(now_ns) if stage else "" for stage in stages),
        slots=tuple(map(tuple, cells)),
        received=tuple(sum(time <= now_ns for time in times) for times in found[above].signals_ns),
        tiles=tuple(tiles),
    )


def frames(events: Sequence[Event]) -> list[Frame]:
    """Returns the frames: one for each product, each finished tile, and each wait for a shard, and one at either end.

    Args:
      events: what `record_kernel` returns.

    Raises:
      ValueError: devices did not act alike.
    """
    found = devices_of(events)
    last_ns = max(to_ns(e.end_s) for e in events)
    moments = sorted([_begin(found[0]), *_moments(found[0]), _end(last_ns)], key=lambda moment: moment[0])
    return [Frame(*how, tuple(state_at(found, d, time) for d in range(len(found)))) for time, *how in moments]


def _begin(device: Device):
    heading = "Every device has its own shard of A, and its columns of B"
    text = "The loader fills the stages of shared memory by TMA."
    return device.uses[0].load_ns[0], f"{heading}\n{text}", _BEGIN_MS, None


def _end(last_ns: int):
    heading = "Every device has its columns of the whole product"
    return last_ns, f"{heading}\nNothing was copied for the sake of sending.", _END_MS, None


def _moments(device: Device):
    """Yields time, text, duration and focus of what device 0 does, in words that hold for every device."""
    for number, use in enumerate(device.uses):
        stage = number % CONFIG.max_concurrent_steps
        heading = f"Step {use.step}, tile ({use.m}, {use.n}) of the result, product {use.k + 1} of {K_STEPS}"
        tile = f"The tile of A in stage {stage}"
        if use.send_ns:
            text = f"{tile} is multiplied, and sent from there into slot {use.step} of the neighbour."
        elif use.step < PROBLEM.axis_size - 1:
            text = f"{tile} was sent before. Column {use.n} needs it again: now it is only multiplied."
        else:
            text = f"{tile} is multiplied. This shard has been everywhere: it is not sent on."
        time = use.send_ns[0] if use.send_ns else use.turn_ns
        yield time, f"{heading}\n{text}", _STEP_MS[use.step], ("stage", stage)
        if use.k == K_STEPS - 1:
            yield _finished(device, use)
    for slot, time in enumerate(device.waits_ns):
        heading = f"The loader begins with step {slot + 1}, while products of step {slot} are still to come"
        text = (
            f"The semaphore of slot {slot} is at {M_TILES} of {M_TILES}: all rows of the shard in this slot are there."
        )
        yield time, f"{heading}\n{text}", _STEP_MS[slot], ("slot", slot)


def _finished(device: Device, use: Use):
    """Returns the moment after the last product of a tile: it is stored, and perhaps the neighbour is told."""
    heading = f"Step {use.step}, tile ({use.m}, {use.n}) of the result is stored"
    if not use.send_ns:
        time, text = device.stored_ns[use.shard * M_TILES + use.m, use.n], "This part of the result is done."
        return time, f"{heading}\n{text}", _STEP_MS[use.step], None
    time, text = device.signals_ns[use.step][use.m], "Its tiles of A have landed. The sender adds 1 to the "
    text += f"neighbour's semaphore of slot {use.step}: {use.m + 1} of {M_TILES}."
    return time, f"{heading}\n{text}", _STEP_MS[use.step], ("slot", use.step)
