"""Kernels for Hopper GPUs, written in Pallas:Mosaic GPU."""

from cmm.hopper.calls import chosen_config
from cmm.hopper.config import MatmulDimension, TuningConfig, default_config
from cmm.hopper.fast_kernel import all_gather_lhs_matmul_fast, plan_fast
from cmm.hopper.matmul import matmul
from cmm.hopper.ring_kernel import all_gather_lhs_matmul

# By their names in `cmm.METHODS`.
KERNELS = {"pallas": all_gather_lhs_matmul, "pallas_fast": all_gather_lhs_matmul_fast}

__all__ = [
    "KERNELS",
    "MatmulDimension",
    "TuningConfig",
    "all_gather_lhs_matmul",
    "all_gather_lhs_matmul_fast",
    "chosen_config",
    "default_config",
    "matmul",
    "plan_fast",
]
