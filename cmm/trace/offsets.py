"""How far are the timers of several GPUs apart?

GPUs play ping-pong with semaphores and note when they hit and when they were hit, as NTP does with packets: device `a`
signals at `t0`, its neighbour `b` has the signal at `t1` and answers at `t2`, `a` has the answer at `t3`. The timer of
`b` is ahead by `((t1 - t0) + (t2 - t3)) / 2`, and wrong by at most half of the time under way, `(t3 - t0) - (t2 - t1)`.
Of many rounds that one counts in which it was shortest. Nothing is stored while a pair plays, for a signal waits until
everybody can see what was stored before. Every neighbouring pair of the ring plays, so the differences around the ring
must add up to nothing: a check of everything between the clocks and here.

Source: RFC 5905, section 8.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P

from cmm.hopper import clocks
from cmm.hopper.axes import forget_axes
from cmm.trace.times import Ticks, is_fine, to_int64

# Slots of one round on one device: three for a tick of its timer, then t0 to t3. Every round has a tick of its own, for
# the length of a cycle may change from one to the next.
_TICK, _NOTES, _PER_ROUND = 0, 3, 7
_STORES_NS = 2000  # After this time everybody has long seen what was stored.


@dataclasses.dataclass(frozen=True)
class Offsets:
    """Differences between the timers of neighbours on a ring, in ns.

    Attributes:
      pair_ns: how far the timer of device `d + 1` is ahead of that of device `d`, for each `d`; the last one closes the
        ring.
      bound_ns: how far off each of them may be.
    """

    pair_ns: tuple[float, ...]
    bound_ns: tuple[float, ...]

    @property
    def closure_ns(self) -> float:
        """What the differences around the ring add up to: nothing, within `closure_bound_ns`."""
        return sum(self.pair_ns)

    @property
    def closure_bound_ns(self) -> float:
        """How much that may be."""
        return sum(self.bound_ns)

    @classmethod
    def none(cls, size: int) -> "Offsets":
        """Returns the offsets of devices that nobody compares: none is known, and none is needed."""
        return cls((0.0,) * size, (0.0,) * size)

    def from_first(self) -> tuple[list[float], list[float]]:
        """Returns how far each device's timer is ahead of that of device 0, and the bounds, by the better way round."""
        offsets, bounds = [], []
        for device in range(len(self.pair_ns)):
            up, down = sum(self.bound_ns[:device]), sum(self.bound_ns[device:])
            offsets.append(sum(self.pair_ns[:device]) if up <= down else -sum(self.pair_ns[device:]))
            bounds.append(min(up, down))
        return offsets, bounds


def between(first: Offsets, second: Offsets) -> Offsets:
    """Returns the offsets halfway between two measurements. What changed from one to the other adds to the bounds."""
    pairs = list(zip(first.pair_ns, second.pair_ns))
    bounds = [max(a, b) for a, b in zip(first.bound_ns, second.bound_ns)]
    return Offsets(
        tuple((a + b) / 2 for a, b in pairs), tuple(bound + abs(a - b) / 2 for (a, b), bound in zip(pairs, bounds))
    )


@functools.cache  # Compiled once for a mesh.
def clock_program(mesh, rounds: int = 100):
    """Returns a jitted function `i32[devices] -> i32[devices, slots, 2]` that plays ping-pong on a mesh of one axis.

    Args:
      mesh: two devices or more.
      rounds: how often every pair plays, at least 2.
    """
    (axis,) = mesh.axis_names
    size = mesh.size
    if size < 2:
        raise ValueError(f"At least 2 devices are needed along {axis!r}, got {size}.")

    def body(x_gmem, out_gmem):
        del x_gmem  # A kernel needs an operand.
        semaphores = pl.get_global(plgpu.SemaphoreType.REGULAR((2,)))
        ping, pong = semaphores.at[0], semaphores.at[1]
        me = lax.axis_index(axis)

        @pl.loop(0, rounds)
        def _round(number):
            clocks.write_tick(out_gmem, number * _PER_ROUND + _TICK, clocks.WARPGROUP)
            first = number * _PER_ROUND + _NOTES
            for pair in range(size):
                partner = (pair + 1) % size

                @pl.when(me == pair)
                def _serve(first=first, partner=partner):
                    clocks.spin(_STORES_NS)
                    hit = clocks.read_mark()
                    pl.semaphore_signal(ping, device_id={axis: partner})
                    pl.semaphore_wait(pong)
                    was_hit = clocks.read_mark()
                    clocks.store_mark(out_gmem, first, hit)
                    clocks.store_mark(out_gmem, first + 3, was_hit)

                @pl.when(me == partner)
                def _return(first=first, pair=pair):
                    pl.semaphore_wait(ping)
                    was_hit = clocks.read_mark()
                    hit = clocks.read_mark()
                    pl.semaphore_signal(pong, device_id={axis: pair})
                    clocks.store_mark(out_gmem, first + 1, was_hit)
                    clocks.store_mark(out_gmem, first + 2, hit)

    def play(x):
        out_type = jax.ShapeDtypeStruct((rounds * _PER_ROUND, 2), jnp.int32)
        return plgpu.kernel(body, out_type=out_type)(forget_axes(x))[None]

    return jax.jit(jax.shard_map(play, mesh=mesh, in_specs=P(axis), out_specs=P(axis), check_vma=False))


def offsets_from(raw) -> Offsets:
    """Computes offsets from what the program of `clock_program` returns."""
    raw = np.asarray(raw)
    size = len(raw)
    times, origins, errors_ns = zip(*(_device_times(device) for device in raw))
    pairs, bounds = [], []
    for a in range(size):
        b = (a + 1) % size
        t0, t3 = times[a][:, 0], times[a][:, 3]
        t1, t2 = times[b][:, 1], times[b][:, 2]
        under_way = (t3 - t0) - (t2 - t1)
        best = int(np.argmin(under_way))
        ahead = (t1[best] - t0[best] + t2[best] - t3[best]) / 2
        pairs.append(float(ahead + (origins[b] - origins[a])))
        bounds.append(float(under_way[best] / 2 + errors_ns[a] + errors_ns[b]))
    return Offsets(tuple(pairs), tuple(bounds))


def _device_times(raw) -> tuple[np.ndarray, int, float]:
    """Returns `[round, 4]` in ns after a reading of the device's timer, that reading, and how far off they may be."""
    rounds = raw.reshape(-1, _PER_ROUND, 2)
    ticks = Ticks(to_int64(rounds[:, _TICK : _TICK + 3]))
    tick_ns = int(np.gcd.reduce(ticks.ns - ticks.ns[0]))
    marks = rounds[:, _NOTES:]
    if is_fine(tick_ns):
        return ticks.by_timer(marks) + tick_ns / 2, ticks.origin, tick_ns / 2
    rate = float(ticks.after[-1] - ticks.after[0]) / float(ticks.ns[-1] - ticks.ns[0])
    return ticks.by_cycles(marks, rate), ticks.origin, float(ticks.half.max() / rate)
