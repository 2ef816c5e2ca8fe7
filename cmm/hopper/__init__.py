"""Kernels for Hopper GPUs, written in Pallas:Mosaic GPU."""

from cmm.hopper.config import MatmulDimension, TuningConfig, default_config
from cmm.hopper.fast_kernel import all_gather_lhs_matmul_fast, plan_fast
from cmm.hopper.matmul import matmul
from cmm.hopper.ring_kernel import all_gather_lhs_matmul

__all__ = [
    "MatmulDimension",
    "TuningConfig",
    "all_gather_lhs_matmul",
    "all_gather_lhs_matmul_fast",
    "default_config",
    "matmul",
    "plan_fast",
]
