"""Over which mesh axes do the operands and results of a kernel differ? Operands do not say so, results are told.

`jax.shard_map` keeps book of the mesh axes over which a value differs (`check_vma=True`). Pallas lets a single warp
work on its own (`plgpu.warp_map`) only on operands that differ over none, as they are without this bookkeeping. JAX has
no function that makes the one out of the other, for it could not check that this is right. It is right for the operands
of a kernel as long as its results are told over which axes they differ: JAX would take results that nobody has told for
the same on all devices, and let them out of `jax.shard_map` as such.
"""

import jax
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

_forget_axes_p = Primitive("forget_axes")


def forget_axes(x):
    """Returns `x` as a value of which nobody knows that it differs between devices. Costs nothing."""
    return _forget_axes_p.bind(x)


def with_axes(out, *like):
    """Returns `out`, of which a kernel says nothing, as a value that differs over all mesh axes over which `like` do.

    Args:
      out: a result of a kernel.
      *like: types (`jax.typeof`) of values, each of which may differ over some axes.
    """
    missing = frozenset().union(*map(_varying, like)) - _varying(jax.typeof(out))
    return lax.pcast(out, tuple(missing), to="varying") if missing else out


def _varying(aval) -> frozenset:
    kind = aval.manual_axis_type  # None where jax.shard_map does not check (check_vma=False)
    return kind.varying if kind else frozenset()


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
