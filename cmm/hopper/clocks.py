"""How does a kernel read the clocks of a GPU, and write down what they say?

A GPU has two. `%clock64` counts cycles of one multiprocessor: fine, but every multiprocessor starts from its own value,
and the length of a cycle depends on power: it changes within microseconds. `%globaltimer` counts nanoseconds for the
whole GPU; it ticks every 32 ns on an H200, elsewhere perhaps only once in a microsecond. The kernels note both, and
`cmm.trace.times` takes the one that is better.

One thread of a warp or warpgroup writes, with plain stores to global memory, 8 bytes at a time. `slots` is always a
reference `i32[n, 2]` in global memory, since JAX has 64-bit integers only on demand. A slot holds a *mark*, the low
halves of cycles and of nanoseconds, or one whole value, low half first. Low halves are enough for seconds, and a mark
is then a single store. All functions work where a warpgroup acts (`threads=128`) and where a single warp does
(`threads=32`).

On simulated devices both clocks come from virtual time, each multiprocessor and each GPU with an offset of its own, so
that whoever forgets to correct for it is caught.

Source: PTX ISA, "Special Registers".
"""

import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.core import Primitive
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from cmm import interpret
from cmm.interpret.evaluate import handles

WARP, WARPGROUP = 32, 128

SIMULATED_CYCLES_PER_NS = 1.5
SIMULATED_TICK_NS = 32
SIMULATED_SKEW_NS = 12_345  # How far the timer of a simulated GPU is ahead of that of the one before.
_SIMULATED_CYCLES_APART = 1_000_003


def write_mark(slots, slot, threads: int) -> None:
    """Writes the low halves of cycles and of nanoseconds to slot number `slot`, or nowhere if that is negative."""
    if interpret.is_active():

        @pl.when(slot >= 0)
        def _():
            _store(slots, slot, _simulated_clocks()[0:4:2])

        return
    # Where there is nothing to note, the clocks are not read either: between two products every cycle counts.
    ptx = """
        @!$0 bra SKIP;
        mov.u32 cycles, %clock;
        mov.u32 ns, %globaltimer_lo;
        st.global.v2.b32 [$1], {cycles, ns};
        SKIP:
    """
    _in_kernel(slots, slot, threads, ptx)


def write_both(slots, slot, threads: int) -> None:
    """Writes all of cycles to slot number `slot`, and all of nanoseconds to the next."""
    if interpret.is_active():
        clocks = _simulated_clocks()
        _store(slots, slot, clocks[:2])
        _store(slots, slot + 1, clocks[2:4])
        return
    ptx = "mov.u64 v, %clock64; mov.u64 w, %globaltimer; @$0 st.global.b64 [$1], v; @$0 st.global.b64 [$1+8], w;"
    _in_kernel(slots, slot, threads, ptx)


def read_mark() -> tuple:
    """Returns the two halves of a mark, which `store_mark` writes later, for a warpgroup.

    A store before a signal would make the signal wait until all GPUs can see what was stored.
    """
    if interpret.is_active():
        return tuple(_simulated_clocks()[0:4:2])
    half = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT)

    @plgpu.inline_mgpu(return_type=(half, half))
    def read(context):
        del context
        i32 = ir.IntegerType.get_signless(32)
        registers = ("%clock", "%globaltimer_lo")
        # One thread stores what it has read itself, so it does not matter that others have read something else.
        values = [llvm.inline_asm(i32, [], f"mov.u32 $0, {name};", "=r,~{memory}", **_EFFECTS) for name in registers]
        return tuple(mosaic.FragmentedArray.splat(value, (), is_signed=True) for value in values)

    return read()


def store_mark(slots, slot, mark, threads: int = WARPGROUP) -> None:
    """Writes what `read_mark` has returned to slot number `slot`."""
    if interpret.is_active():
        _store(slots, slot, mark)
        return
    _in_kernel(slots, slot, threads, "@$0 st.global.v2.b32 [$1], {$2, $3};", mark)


def write_tick(slots, slot, threads: int) -> None:
    """Waits until the nanosecond timer ticks, then writes three values, from slot number `slot` on.

    Cycles shortly before the tick, cycles shortly after it, and the nanoseconds at the tick.
    """
    if interpret.is_active():
        clocks = _simulated_clocks()
        for number, first in enumerate((4, 4, 6)):
            _store(slots, slot + number, clocks[first : first + 2])
        return
    ptx = """
        mov.u64 old, %globaltimer;
        mov.u64 v, %clock64;
        TICK:
        mov.u64 u, v;
        mov.u64 w, %globaltimer;
        mov.u64 v, %clock64;
        setp.eq.u64 again, w, old;
        @again bra TICK;
        @$0 st.global.b64 [$1], u;
        @$0 st.global.b64 [$1+8], v;
        @$0 st.global.b64 [$1+16], w;
    """
    _in_kernel(slots, slot, threads, ptx)


def spin(duration_ns: int) -> None:
    """Keeps the calling threads busy until the nanosecond timer has advanced by `duration_ns`."""
    if interpret.is_active():
        pl.delay(duration_ns)
        return

    @plgpu.inline_mgpu()
    def wait(context):
        del context
        ptx = f"""{{
            .reg .pred again; .reg .b64 until, now;
            mov.u64 until, %globaltimer;
            add.u64 until, until, {duration_ns};
            SPIN:
            mov.u64 now, %globaltimer;
            setp.lt.u64 again, now, until;
            @again bra SPIN;
        }}"""
        _asm(ptx, [], "~{memory}")

    wait()


def _in_kernel(slots, slot, threads, ptx, values=()) -> None:
    """Emits PTX in which `$1` is the address of a slot, and `$0` says whether this thread stores there.

    The scalars `values`, in `i32`, are `$2` and so on.
    """
    splats = (plgpu.Layout.WG_SPLAT,) * (1 + len(values))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *splats))
    def write(context, slots, slot, *values):
        del context
        i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
        number = slot.registers.item()
        lane = arith.remui(mosaic.thread_idx(), mosaic.c(threads, i32))
        writes = arith.andi(
            arith.cmpi(arith.CmpIPredicate.eq, lane, mosaic.c(0, i32)),
            arith.cmpi(arith.CmpIPredicate.sge, number, mosaic.c(0, i32)),
        )
        start = llvm.ptrtoint(i64, mosaic.utils.memref_ptr(slots))
        address = arith.addi(start, arith.muli(arith.extsi(i64, number), mosaic.c(8, i64)))
        operands = [writes, address, *(value.registers.item() for value in values)]
        registers = ".reg .pred again; .reg .b32 cycles, ns; .reg .b64 old, u, v, w;"
        _asm(f"{{ {registers} {ptx} }}", operands, ",".join(["b,l", *"r" * len(values), "~{memory}"]))

    write(slots, jnp.int32(slot), *values)


# Says that it touches memory, so that copies and stores of the kernel stay on their side of it.
_EFFECTS = {"has_side_effects": True}


def _asm(ptx, operands, constraints) -> None:
    llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, ptx, constraints, **_EFFECTS)


_simulated_clocks_p = Primitive("simulated_clocks")
_simulated_clocks_p.multiple_results = True


@_simulated_clocks_p.def_abstract_eval
def _abstract_clocks():
    return [ShapedArray((), jnp.int32)] * 8


def _simulated_clocks():
    """Returns cycles, nanoseconds, and both again at the next tick of the latter; low and high half of each."""
    return _simulated_clocks_p.bind()


@handles("simulated_clocks")
def _read_simulated_clocks(thread, op, values):
    del op, values
    now_ns = thread.machine.scheduler.now * 1e9 + (1 + thread.device) * SIMULATED_SKEW_NS  # 0 is no time of a GPU.
    first_cycle = _SIMULATED_CYCLES_APART * (1 + thread.device * 1000 + thread.cta.number)
    ticks = int(now_ns // SIMULATED_TICK_NS)
    cycles_at = lambda ns: first_cycle + round(ns * SIMULATED_CYCLES_PER_NS)
    tick_ns = (ticks + 1) * SIMULATED_TICK_NS
    clocks = cycles_at(now_ns), ticks * SIMULATED_TICK_NS, cycles_at(tick_ns), tick_ns
    return [half for value in clocks for half in _halves(value)]
    yield  # A handler is a generator even if it never pauses.


def _halves(value: int):
    low, high = value & 0xFFFFFFFF, value >> 32
    return np.int32(low - (low >> 31 << 32)), np.int32(high)


def _store(slots, slot, halves) -> None:
    for number, half in enumerate(halves):
        slots[slot, number] = half
