"""Operands that do not say over which mesh axes they differ.

`jax.shard_map` keeps book of the mesh axes over which a value differs (`check_vma=True`). Pallas lets a single warp
work on its own (`plgpu.warp_map`) only on operands that differ over none, as they are without this bookkeeping. JAX has
no function that makes the one out of the other, for it could not check that this is right. It is right for the operands
of a kernel, whose results are told over which axes they differ.
"""

from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

_forget_axes_p = Primitive("forget_axes")


def forget_axes(x):
    """Returns `x` as a value of which nobody knows that it differs between devices. Costs nothing."""
    return _forget_axes_p.bind(x)


@_forget_axes_p.def_impl
def _impl(x):
    return x


@_forget_axes_p.def_abstract_eval
def _abstract_eval(aval):
    return ShapedArray(aval.shape, aval.dtype, sharding=aval.sharding)


def _batch(operands, axes):
    return forget_axes(*operands), *axes


mlir.register_lowering(_forget_axes_p, lambda ctx, x: [x])
batching.primitive_batchers[_forget_axes_p] = _batch
