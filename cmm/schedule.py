"""The ring as data: who computes, sends and receives which shard, and when.

Notation. `axis_size` devices stand on a ring. Device `d` owns shard `d`. Shards travel "down": from device `d` to
`(d - 1) % axis_size`. So at step `i` device `d` holds shard `(d + i) % axis_size`, multiplies it by its own weights,
and sends it on unless the step is the last one. Travelling "up" is the mirror image.

Pure Python, no JAX. The arithmetic of `shard_at` and `neighbour` also holds for traced JAX integers, so the programs
that run on devices and the figures that explain them share it.
"""

import dataclasses
from typing import Literal

Direction = Literal["down", "up"]

_STRIDE = {"down": 1, "up": -1}


@dataclasses.dataclass(frozen=True)
class RingStep:
    """What one device does in one step of the ring.

    Attributes:
      step: step index, 0 to `axis_size - 1`.
      device: the device that acts.
      computes: the shard that it multiplies by its own weights.
      reads_slot: the receive slot that holds this shard, `None` for the device's own shard (step 0).
      sends: the shard that it sends meanwhile, `None` in the last step. Always the shard that it computes with.
      send_to: the device that receives it, `None` in the last step.
      send_slot: the slot of the receiver that it lands in, `None` in the last step. Each slot is written once, so a
        fast sender can never overwrite a shard that its receiver still reads.
    """

    step: int
    device: int
    computes: int
    reads_slot: int | None
    sends: int | None
    send_to: int | None
    send_slot: int | None


def shard_at(device, step, axis_size, direction: Direction = "down"):
    """Returns the index of the shard that `device` holds at `step`. Takes Python or traced integers."""
    # Adding axis_size keeps the argument positive: C's remainder and Python's then agree.
    return (device + _STRIDE[direction] * step + axis_size) % axis_size


def neighbour(device, axis_size, direction: Direction = "down"):
    """Returns the device that `device` sends to. Takes Python or traced integers."""
    return (device - _STRIDE[direction] + axis_size) % axis_size


def send_pairs(axis_size: int, direction: Direction = "down") -> list[tuple[int, int]]:
    """Returns the `(source, target)` pairs of one hop, in the form that `jax.lax.ppermute` takes."""
    return [(device, neighbour(device, axis_size, direction)) for device in range(axis_size)]


def ring_schedule(axis_size: int, direction: Direction = "down") -> tuple[tuple[RingStep, ...], ...]:
    """Returns the whole schedule: one tuple per step, with one `RingStep` per device in it.

    Args:
      axis_size: number of devices on the ring, at least 1.
      direction: "down" sends from device `d` to `d - 1`, "up" from `d` to `d + 1`.

    Returns:
      `schedule[step][device]`, with `axis_size` steps of `axis_size` devices.

    Raises:
      ValueError: `axis_size` is below 1, or the direction is neither "down" nor "up".

    Source: the ring of "Collective matrix multiplication" in the JAX documentation (Pallas:Mosaic GPU), and
    Wang et al., "Overlap communication with dependent computation via decomposition", ASPLOS 2023.
    """
    if axis_size < 1:
        raise ValueError(f"axis_size must be at least 1, got {axis_size}.")
    if direction not in _STRIDE:
        raise ValueError(f'direction must be "down" or "up", got {direction!r}.')
    steps = []
    for step in range(axis_size):
        last = step == axis_size - 1
        row = []
        for device in range(axis_size):
            shard = shard_at(device, step, axis_size, direction)
            row.append(
                RingStep(
                    step=step,
                    device=device,
                    computes=shard,
                    reads_slot=None if step == 0 else step - 1,
                    sends=None if last else shard,
                    send_to=None if last else neighbour(device, axis_size, direction),
                    send_slot=None if last else step,
                )
            )
        steps.append(tuple(row))
    return tuple(steps)
