"""How many SMs does a persistent kernel believe to have?"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator

import jax


class _Device:
    """Looks like `device`, but says how many SMs it has."""

    def __init__(self, device, core_count: int):
        self._device = device
        self.core_count = core_count

    def __getattr__(self, name):
        return getattr(self._device, name)


@contextlib.contextmanager
def pretend_core_count(module, core_count: int) -> Iterator[None]:
    """Lets the functions of `module` see devices with so many SMs.

    Persistent kernels ask `jax.devices()[0].core_count` how many CTAs to launch,
    which a CPU device cannot say. In this block the name `jax` of the module
    answers instead; its source stays as it is.

    Args:
      module: a module that does `import jax`.
      core_count: the number of SMs, hence of CTAs per device.

    Raises:
      ValueError: the module has no global name `jax`.
    """
    real = getattr(module, "jax", None)
    if real is not jax:
        raise ValueError(f"{module.__name__} does not import jax by that name")

    class Jax(types.ModuleType):
        def __getattr__(self, name):
            return getattr(real, name)

    stand_in = Jax("jax")
    stand_in.devices = lambda *args: [_Device(d, core_count) for d in real.devices(*args)]
    module.jax = stand_in
    try:
        yield
    finally:
        module.jax = real
