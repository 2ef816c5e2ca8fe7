"""One CTA of JAX's example sleeps once, its source untouched."""

import contextlib
import functools
import types
from collections.abc import Iterator

from jax import lax
from jax.experimental import pallas as pl

from cmm.job import AXIS
from cmm.peers.jax_example import load_example

LATE_DEVICE, LATE_CTA = 0, 1
_PIECE_US = 10


@contextlib.contextmanager
def late_cta(delay_us: int, axis_name: str = AXIS, *, device: int = LATE_DEVICE, cta: int = LATE_CTA) -> Iterator[None]:
    """Makes one CTA late in what is traced in this block: it sleeps once, at the start of step 0.

    The example computes each step with the kernel of `hopper_matmul_mgpu`. In this block the example's name of that
    module leads to the same kernel with a sleep before it. The sources stay as they are.

    Args:
      delay_us: nominal time of the sleep. A GPU may sleep between none and twice of it; 0 changes nothing.
      axis_name: the mesh axis of the ring.
      device, cta: which CTA.
    """
    example = load_example()
    real = example.hopper_matmul_mgpu
    if delay_us:
        example.hopper_matmul_mgpu = _stand_in(real, functools.partial(_sleep, delay_us, axis_name, device, cta))
    try:
        yield
    finally:
        example.hopper_matmul_mgpu = real


def _stand_in(module, sleep):
    """Returns what looks like `module`, but whose kernel sleeps before step 0."""

    def kernel(lhs_gmem, *args, **kwargs):
        # Step 0 reads the operand itself, later steps a view of the scratch buffer.
        if not hasattr(lhs_gmem, "transforms"):
            sleep()
        return module.kernel(lhs_gmem, *args, **kwargs)

    stand_in = types.ModuleType(module.__name__)
    stand_in.__getattr__ = functools.partial(getattr, module)
    stand_in.kernel = kernel
    return stand_in


def _sleep(delay_us, axis_name, device, cta):
    @pl.when((lax.axis_index(axis_name) == device) & (lax.axis_index("cluster_grid") == cta))
    def _():
        # One nanosleep takes anything from 0 to twice its time, and at most 1 ms. Many short ones come closer.
        @pl.loop(0, delay_us // _PIECE_US)
        def _(_):
            pl.delay(_PIECE_US * 1000)

        if rest_us := delay_us % _PIECE_US:
            pl.delay(rest_us * 1000)
