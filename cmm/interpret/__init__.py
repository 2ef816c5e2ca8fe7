"""Runs, checks and race-detects multi-GPU Pallas kernels without a GPU.

    import cmm.devices, cmm.interpret

    cmm.devices.find_devices(4, simulate=True)
    with cmm.interpret.simulate(seed=0) as sim:
      y = sim.run(jax.jit(jax.shard_map(f, ...)), x)
    sim.bytes_sent(device=0), sim.events

`f` may call any `plgpu.kernel` that is written for Hopper: warpgroups, warps, TMA,
barriers, wgmma, semaphores, references to peers. All warpgroups of all CTAs of all
devices are coroutines of one scheduler in virtual time. A run is reproducible, and
each seed is another order of threads. A run ends in one of four ways: it is right,
or it raises `RaceError`, `DeadlockError`, or what the kernel itself raised.

What a quiet run does not promise:
- It says nothing about other inputs, and about other orders only by more seeds.
- Semaphores count in the order of arrival. A protocol that confuses two signals is
  seen only in runs where they arrive in the bad order; `Late` and seeds help.
- Fences between threads and TMA are checked in shared memory; in global memory only
  with `check_proxy_fences=True`.
- It knows no layouts, no registers, no PTX; `lower_for_cuda` knows some of it.
- Gradients through `jax.checkpoint` are refused by JAX: simulated kernels run in
  callbacks, which it does not run again. `lower_for_cuda` takes such programs.
- Clusters with more than one CTA that share memory, Blackwell's instructions,
  multicast, and inline assembly that does not say what it stands for
  (`simulated_as`), are refused by name.
"""

# Imported for their effect: each registers how it evaluates its primitives.
from cmm.interpret import communication, control, copies, operations, products  # noqa: F401
from cmm.interpret._jax_private import SUPPORTED_VERSIONS, UnsupportedJaxError
from cmm.interpret.core_count import pretend_core_count
from cmm.interpret.errors import BarrierError, DeadlockError, LaunchError, RaceError, SimulationError, Waiting
from cmm.interpret.evaluate import simulated_as
from cmm.interpret.lowering import lower_for_cuda
from cmm.interpret.races import Race, Side
from cmm.interpret.record import KINDS, Event, bytes_sent, from_rows, to_rows
from cmm.interpret.simulation import Late, Simulation, is_active, simulate, simulated_core_count

__all__ = [
    "KINDS",
    "SUPPORTED_VERSIONS",
    "BarrierError",
    "DeadlockError",
    "Event",
    "Late",
    "LaunchError",
    "Race",
    "RaceError",
    "Side",
    "Simulation",
    "SimulationError",
    "UnsupportedJaxError",
    "Waiting",
    "bytes_sent",
    "from_rows",
    "is_active",
    "lower_for_cuda",
    "pretend_core_count",
    "simulate",
    "simulated_as",
    "simulated_core_count",
    "to_rows",
]
