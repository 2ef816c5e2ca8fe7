"""Which kernels can be tuned, and over which configurations?"""

import dataclasses
from collections.abc import Callable, Sequence

import jax

from cmm.hopper import all_gather_lhs_matmul, all_gather_lhs_matmul_fast, default_config
from cmm.hopper.calls import rounds_of
from cmm.hopper.candidates import candidates
from cmm.peers import jax_example
from cmm.roofline import Problem


@dataclasses.dataclass(frozen=True)
class Tunable:
    """A kernel with configurations to choose from.

    Attributes:
      name: what `python -m cmm.tune --kernel` takes, and what records of winners say.
      function: `function(lhs, rhs, axis_name, config=config)` computes this device's columns of the product.
      candidates: `candidates(problem, device)` returns configurations, frozen dataclasses, the most promising first.
        They need not all fit: one that cannot be compiled is left out.
      try_all: whether all of them are tried by default, however many there are.
      check_vma: as in `jax.shard_map`.
      must_be_right: whether a configuration with a wrong result cannot win.
      all_devices: whether it only works on all devices that the process sees.
      cached: whether calls look for its winners in the user's cache.
    """

    name: str
    function: Callable
    candidates: Callable[[Problem, jax.Device], Sequence]
    try_all: bool = False
    check_vma: bool = True
    must_be_right: bool = True
    all_devices: bool = False
    cached: bool = True


def _hopper_candidates(problem, device, kernel="pallas"):
    """Returns the configuration that a kernel takes without a search, and then the others."""
    sizes = (problem.m_shard, problem.n_shard, problem.k, problem.dtype, device.core_count)
    rounds = rounds_of(kernel, problem.axis_size)
    others = candidates(*sizes, **rounds)
    if not others:
        return []
    default = default_config(*sizes, **rounds)
    return [default, *(config for config in others if config != default)]


# Announcements of the fast kernel that are worth a try with the most promising tiles; see cmm.hopper.sends.
_ANNOUNCEMENTS = ({"chunks": 2, "signal_lag": 8}, {"chunks": 4, "signal_lag": 8}, {"chunks": 16, "signal_lag": 4})
_ANNOUNCEMENTS_FOR = 4


def _fast_candidates(problem, device):
    plain = _hopper_candidates(problem, device, "pallas_fast")
    others = [
        dataclasses.replace(config, **changes) for config in plain[:_ANNOUNCEMENTS_FOR] for changes in _ANNOUNCEMENTS
    ]
    return [*plain[:_ANNOUNCEMENTS_FOR], *others, *plain[_ANNOUNCEMENTS_FOR:]]


TUNABLES = {
    kernel.name: kernel
    for kernel in (
        Tunable("pallas", all_gather_lhs_matmul, _hopper_candidates),
        Tunable("pallas_fast", all_gather_lhs_matmul_fast, _fast_candidates),
        # The example is compared as it is: its own search does not check results.
        Tunable(
            "jax_example",
            jax_example.all_gather_matmul,
            lambda problem, device: jax_example.search_space(),
            try_all=True,
            check_vma=False,
            must_be_right=False,
            all_devices=True,
            cached=False,
        ),
    )
}
