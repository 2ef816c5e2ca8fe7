"""Many checked calls of a Hopper kernel while somebody is late, on real GPUs and on simulated devices alike.

Who is late is an operand of the program, so one compiled kernel serves all cases. The kernel's sources stay as they
are: while it is traced, it gets one more operand, and its roles sleep if that says so.
"""

import contextlib
import dataclasses
import functools
import importlib
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxlib.mlir import ir

import cmm
from cmm import devices, interpret, reference
from cmm.hopper import default_config, fast_kernel, roles
from cmm.hopper.axes import forget_axes
from cmm.hopper.plan import plan_tiles
from cmm.hopper.rounds import HalfPlan, Rounds, StepPlan

ANY = -1
SENDER = roles.LOADER + 1  # The fast kernel's; in the readable one a multiplier sends.
# One sleep of a GPU takes anything from 0 to twice its time, and at most 1 ms. Many short ones come closer.
NAP_US = 10

_matmul_module = importlib.import_module("cmm.hopper.matmul")  # The package's attribute of this name is the function.
_BATCH = 20  # Calls whose results are fetched together.


@dataclasses.dataclass(frozen=True)
class Late:
    """Who sleeps in a call, when, and for how many naps of `NAP_US` (nominal; virtual time on simulated devices).

    Attributes:
      device: place in the mesh, row-major.
      cta: number of a CTA, or `ANY` for all of them.
      role: number of a multiplier, `roles.LOADER`, `SENDER`, or `ANY` for all of them.
      step: of the ring.
      use: loader and sender sleep before this use of a stage, counted from the start of the step. Multipliers always
        sleep at the start. Nobody sleeps in a step of which his CTA has no tile.
      naps: how many; nobody is late with 0.
      before_the_kernel: the whole device is late: its naps end before its kernel starts. On GPUs JAX starts a kernel
        that talks only when all devices have come to it, so the others then wait before their kernels, not in them.
    """

    device: int = 0
    cta: int = ANY
    role: int = ANY
    step: int = 0
    use: int = 0
    naps: int = 0
    before_the_kernel: bool = False

    def operand(self) -> np.ndarray:
        """The fields as the programs take them: `i32[6]`."""
        naps = 0 if self.before_the_kernel else self.naps
        return np.array([self.device, self.cta, self.role, self.step, self.use, naps], np.int32)


def draw_late(rng, num_devices, axis_size, plan, has_sender=False) -> Late:
    """Returns somebody who is late: a role of one CTA or of each, all roles, or now and then the device itself."""
    spans = (has_sender or axis_size == 1) and Rounds(plan, axis_size).span_steps
    last = min(plan.tiles * (axis_size if spans else 1), plan.num_ctas) - 1
    cta = int(rng.choice([0, min(1, last), min(plan.m_tiles - 1, last), last, ANY]))
    tiles = _tiles_by_step(last if cta == ANY else cta, axis_size, plan, spans)
    step = int(rng.choice(np.flatnonzero(tiles)))
    tiles = tiles[step]
    late = Late(
        device=int(rng.integers(num_devices)),
        cta=cta,
        role=int(rng.choice([0, 1, roles.LOADER, *[SENDER] * has_sender, ANY])),
        step=step,
        use=int(rng.choice([0, rng.integers(tiles * plan.k_steps)])),
        naps=int(rng.choice([1, 5, 30, 100])),
    )
    return dataclasses.replace(late, before_the_kernel=bool(rng.random() < 0.15))


def _tiles_by_step(cta, axis_size, plan, spans):
    """Returns how many tiles of each step a CTA computes; a half counts as one."""
    halved = Rounds(plan, axis_size).deal.halved if spans else 0
    linear = np.arange(axis_size)[:, None] * plan.tiles * spans + np.arange(plan.tiles)
    whole = linear < axis_size * plan.tiles - halved if spans else True
    tiles = (whole & (linear % plan.num_ctas == cta)).sum(axis=1)
    tiles[-1] += cta < 2 * halved
    return tiles


def late_shard(function, axes):
    """Returns `function(lhs, rhs)`, a kernel on one device, as a function that takes `Late.operand()` as well."""

    def shard(lhs, rhs, late):
        naps = jnp.where(lax.axis_index(axes) == late[0], late[5], 0)
        with _late_roles(forget_axes(jnp.concatenate([late[1:5], naps[None]]))):
            return function(lhs, rhs)

    return shard


def nap_shard(axes):
    """Returns a function of one device that occupies it for a while: `naps(i32[2])`, a device and a number of naps."""

    def body(naps_gmem, out_gmem):
        del out_gmem  # A program needs a result; nobody reads it.
        _sleep(naps_gmem[0])

    def shard(who):
        naps = jnp.where(lax.axis_index(axes) == who[0], who[1], 0)
        kernel = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((1,), jnp.int32))
        return kernel(naps[None])

    return shard


def _sleep(naps, in_warp=False):
    @pl.loop(0, naps)
    def _(_):
        if in_warp and not interpret.is_active():
            _nap_of_a_warp()
        else:
            pl.delay(NAP_US * 1000)


@plgpu.inline_mgpu()
def _nap_of_a_warp(context):
    # What JAX makes of `pl.delay`, which it does not lower where a single warp acts.
    del context
    mosaic.nanosleep(mosaic.c(NAP_US * 1000, ir.IntegerType.get_signless(32)))


@contextlib.contextmanager
def _late_roles(late):
    """Gives kernels that are traced in this block the operand `late`: cta, role, step, use and naps."""
    real = _matmul_module.persistent_kernel

    def persistent_kernel(in_warps, plan, body, *args, **kwargs):
        def kernel(*operands):
            def late_body(*refs):
                before, late_gmem, after = refs[: len(operands)], refs[len(operands)], refs[len(operands) + 1 :]
                with _sleeping_roles(late_gmem, in_warps):
                    body(*before, *after)

            return real(plan, late_body, *args, **kwargs)(*operands, late)

        return kernel

    with contextlib.ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("cmm.hopper.") and hasattr(module, "persistent_kernel"):
                stand_in = functools.partial(persistent_kernel, module is fast_kernel)
                stack.enter_context(mock.patch.object(module, "persistent_kernel", stand_in))
        yield


@contextlib.contextmanager
def _sleeping_roles(late_gmem, in_warps):
    """Makes the roles sleep as `late_gmem` says. `in_warps`: the loader is a single warp, and so is a sender."""
    cta, who, step, at_use, naps = (late_gmem[i] for i in range(5))
    naps = jnp.where((cta == ANY) | (lax.axis_index("cta") == cta), naps, 0)
    naps_of = {role: jnp.where((who == ANY) | (who == role), naps, 0) for role in (0, 1, roles.LOADER, SENDER)}
    load_tiles, multiply_tiles, send_tile = roles.load_tiles, roles.multiply_tiles, fast_kernel._send_tile
    send_use = fast_kernel._send_use

    def is_at(plan, first_use):
        """Whether this is the step; `first_use` would not tell where steps share rounds."""
        if isinstance(plan, (StepPlan, HalfPlan)):
            return plan.step == step
        return first_use == step * (plan.my_tiles() * plan.k_steps)

    def late_load(plan, first_use, a_gmem, b_gmem, ready=None, **memory):
        tiles = _TilesByIndex(plan)
        is_step = is_at(plan, first_use)

        def late_ready(m_tile, k_step):
            is_use = (_tiles_before(plan) + tiles.index) * plan.k_steps + k_step == at_use
            _sleep(jnp.where(is_step & is_use, naps_of[roles.LOADER], 0), in_warps)
            if ready is not None:
                ready(m_tile, k_step)

        load_tiles(tiles, first_use, a_gmem, b_gmem, late_ready, **memory)

    def late_multiply(plan, first_use, *args, **kwargs):
        mine = jnp.where(lax.axis_index("wg") == 0, naps_of[0], naps_of[1])
        begins_step = is_at(plan, first_use) & (plan.my_tiles() > 0) & (_tiles_before(plan) == 0)
        _sleep(jnp.where(begins_step, mine, 0))
        multiply_tiles(plan, first_use, *args, **kwargs)

    def late_send_tile(sends, rounds, *args, **memory):
        def late_send_use(tile, k_step, *args, **memory):
            use = tile.first_use + k_step
            all_uses = rounds.my_tiles() * sends.plan.k_steps
            end = jnp.where(step == rounds.axis_size - 1, all_uses, rounds.first_use(step + 1))
            is_use = (use == rounds.first_use(step) + at_use) & (use < end)
            _sleep(jnp.where(is_use, naps_of[SENDER], 0), in_warp=True)
            return send_use(tile, k_step, *args, **memory)

        with mock.patch.object(fast_kernel, "_send_use", late_send_use):
            return send_tile(sends, rounds, *args, **memory)

    with (
        mock.patch.multiple(roles, load_tiles=late_load, multiply_tiles=late_multiply),
        mock.patch.object(fast_kernel, "_send_tile", late_send_tile),
    ):
        yield


def _tiles_before(plan):
    """Returns how many whole tiles of its step this CTA has before those of a plan: before a half, if it has one."""
    if not isinstance(plan, HalfPlan):
        return 0
    return Rounds(plan.uncut, plan.step + 1).of_step(plan.step).my_tiles()  # Halves are of the last step.


class _TilesByIndex:
    """A plan that remembers which of its tiles the loader is at."""

    def __init__(self, plan):
        self._plan = plan
        self.index = None

    def tile_at(self, index):
        self.index = index
        return self._plan.tile_at(index)

    def __getattr__(self, name):
        return getattr(self._plan, name)


@functools.cache  # One program for all problems.
def _nap_program(mesh):
    return jax.jit(jax.shard_map(nap_shard(mesh.axis_names), mesh=mesh, in_specs=P(), out_specs=P(mesh.axis_names)))


class Calls:
    """Calls of one kernel on one problem. Each has new operands, meets poisoned memory, and is judged.

    Args:
      function: `function(lhs, rhs)`, what one device computes inside `jax.shard_map`.
      mesh: the mesh. Every device has rows and columns of its own, also where the ring is along one axis of several.
      problem: shapes and dtype; `axis_size` is that of the ring.
      axis: the ring's axis.
      num_ctas: CTAs of the kernel on one device.
      config: what `function` uses, to know how many tiles there are; by default the default.
      has_sender: whether it is the fast kernel, which has a role more.
      as_it_is: also compile the kernel without the sleeps. Otherwise it has them, and nobody sleeps.
      run: how programs are called; `Simulation.run` on simulated devices.
    """

    def __init__(
        self, function, mesh, problem, axis="x", *, num_ctas, config=None, has_sender=False, as_it_is=True, run=None
    ):
        self.mesh, self.problem, self.axis, self.has_sender = mesh, problem, axis, has_sender
        self.axes = mesh.axis_names
        m, n, k = problem.m_shard, problem.n_shard, problem.k
        steps = problem.axis_size if has_sender else 1
        halves = has_sender or problem.axis_size == 1
        config = config or default_config(m, n, k, problem.dtype, num_ctas, steps, halves)
        self.plan = plan_tiles(m, n, k, config, num_ctas, steps, halves)
        rows, columns = P(self.axes, None), P(None, self.axes)
        self._run = run or (lambda program, *operands: program(*operands))
        self._late = self._program(late_shard(function, self.axes), (rows, columns, P()), columns)
        self._as_it_is = self._program(function, (rows, columns), columns) if as_it_is else None
        self._compare = self._program(self._compare_shard, (columns, columns, rows, columns), rows)
        self._nan = jax.jit(self._nan_arrays, out_shardings=NamedSharding(mesh, rows))

    def _program(self, function, in_specs, out_specs):
        return jax.jit(jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs))

    def operands(self, seed):
        """Returns new normal operands."""
        everywhere = dataclasses.replace(self.problem, axis_size=self.mesh.size)
        return devices.random_operands(everywhere, self.mesh, seed, self.axes)

    def poison(self) -> set:
        """Fills free memory with NaN, and returns the addresses of what it filled: `(device, start, stop)`.

        The arrays are as large as the result and the scratch buffer, so that the allocator takes their memory for
        these. What a kernel does not write, or reads too early, then cannot look right by chance.
        """
        arrays = [array for _ in range(2) for array in self._nan()]
        jax.block_until_ready(arrays)
        places = set().union(*map(addresses, arrays))
        for array in arrays:
            array.delete()
        return places

    def _nan_arrays(self):
        p = self.problem
        shapes = [(p.axis_size * p.m_shard, p.n_shard), ((p.axis_size - 1) * p.m_shard, p.k)]
        return [jnp.full((self.mesh.size * m, k), jnp.nan, p.dtype) for m, k in shapes if m]

    def call(self, operands, late=None):
        """Calls the kernel; with `late`, somebody is. Does not wait."""
        late = late or Late()
        if late.before_the_kernel:
            self._run(_nap_program(self.mesh), np.array([late.device, late.naps], np.int32))
        operand = late.operand()
        if self._as_it_is and not operand[-1]:
            return self._run(self._as_it_is, *operands)
        return self._run(self._late, *operands, operand)

    def check(self, count, first_seed=0):
        """Makes `count` calls, each with new operands, and repeats each. Somebody is late in one of the two.

        Raises:
          AssertionError: a result is wrong, or the two differ; the message says in which call and who was late.
        """
        rng = np.random.default_rng(first_seed)
        pending = []
        for number in range(count):
            seed = first_seed + number
            operands = self.operands(seed)
            late = draw_late(rng, self.mesh.size, self.problem.axis_size, self.plan, self.has_sender)
            # Every other time the late call comes first, when no result for these operands lies in memory.
            order = (late, None) if number % 2 == 0 else (None, late)
            results = []
            for who in order:
                self.poison()
                results.append(self.call(operands, who))
            name = f"call {number} of {count}, seed {seed}, {late}, late call {'first' if order[0] else 'second'}"
            pending.append((name, self.measure(*results, *operands)))
            if len(pending) == _BATCH or number == count - 1:
                for name, measured in jax.device_get(pending):
                    assert_right(measured, self.problem, name)
                pending = []

    def measure(self, first, second, lhs, rhs):
        """Compares two results with the naive method's and with each other, for `assert_right`. Does not wait.

        Returns:
          `f32[number of devices, 6]`: for each result the largest error over its bound and the squared error; the
          squared norm of the product; how many elements of the two results differ in their bits.
        """
        return self._compare(first, second, lhs, rhs)

    def _compare_shard(self, first, second, lhs, rhs):
        exact = cmm.all_gather_matmul_naive(lhs, rhs, self.axis, dtype="float32")
        k = self.problem.k
        # Sums of k products of normal numbers stay near sqrt(k), which makes a far tighter bound than the worst case.
        bound = reference.error_bound(exact, k**0.5, k, first.dtype)
        measured = []
        for out in (first, second):
            error = jnp.abs(out.astype(jnp.float32) - exact)
            ratio = error / bound
            measured += [jnp.max(jnp.where(jnp.isfinite(ratio), ratio, jnp.inf)), jnp.sum(error**2)]
        bits = [lax.bitcast_convert_type(out, jnp.uint16) for out in (first, second)]
        different = jnp.sum(bits[0] != bits[1], dtype=jnp.float32)
        return jnp.stack([*measured, jnp.sum(exact**2), different])[None]


def assert_right(measured, problem, name):
    """Checks what `Calls.measure` returns.

    Raises:
      AssertionError: with `name` and the numbers.
    """
    measured = np.asarray(measured, np.float64)
    limit = reference.relative_limit(problem.k, problem.dtype)
    for which, column in (("first", 0), ("second", 2)):
        worst = measured[:, column].max()
        relative = np.sqrt(measured[:, column + 1].sum() / measured[:, 4].sum())
        text = f"{problem}, {name}: the {which} result has error over bound {measured[:, column]} on the devices"
        assert worst <= 1, text
        assert relative <= limit, f"{text}, relative error {relative:.3g} over {limit:.3g}"
    assert not measured[:, 5].any(), f"{problem}, {name}: elements that differ in their bits: {measured[:, 5]}"


def addresses(array) -> set:
    """Returns where an array lies: `(device id, start, stop)` in bytes for each shard."""
    shards = [shard.data for shard in array.addressable_shards]
    starts = [shard.unsafe_buffer_pointer() for shard in shards]
    return {(shard.device.id, start, start + shard.nbytes) for shard, start in zip(shards, starts)}
