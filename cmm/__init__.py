"""Collective matrix multiplication in JAX: `AllGather(A) @ B` with the transfer hidden behind the product."""

from cmm.dispatch import METHODS, all_gather_matmul
from cmm.naive import all_gather_matmul_naive
from cmm.ring import COPY_ENGINE_OPTIONS, all_gather_matmul_ring, all_gather_matmul_ring_bidirectional

__all__ = [
    "COPY_ENGINE_OPTIONS",
    "METHODS",
    "all_gather_matmul",
    "all_gather_matmul_naive",
    "all_gather_matmul_ring",
    "all_gather_matmul_ring_bidirectional",
]
__version__ = "0.1.0"
