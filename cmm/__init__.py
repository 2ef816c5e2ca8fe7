"""Collective matrix multiplication in JAX: `AllGather(A) @ B` with the transfer hidden behind the product."""

from cmm.dispatch import METHODS, all_gather_matmul
from cmm.naive import all_gather_matmul_naive
from cmm.ring import COPY_ENGINE_OPTIONS, all_gather_matmul_ring, all_gather_matmul_ring_bidirectional

# Looked up in cmm.hopper when first used: it imports Pallas.
_KERNELS = ("MatmulDimension", "TuningConfig", "all_gather_lhs_matmul", "all_gather_lhs_matmul_fast", "matmul")

__all__ = [
    "COPY_ENGINE_OPTIONS",
    "METHODS",
    "MatmulDimension",
    "TuningConfig",
    "all_gather_lhs_matmul",
    "all_gather_lhs_matmul_fast",
    "all_gather_matmul",
    "all_gather_matmul_naive",
    "all_gather_matmul_ring",
    "all_gather_matmul_ring_bidirectional",
    "matmul",
]
__version__ = "0.1.0"


def __getattr__(name: str):
    if name in _KERNELS:
        from cmm import hopper

        return getattr(hopper, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return [*globals(), *_KERNELS]
