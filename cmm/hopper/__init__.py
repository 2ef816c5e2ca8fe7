"""Kernels for Hopper GPUs, written in Pallas:Mosaic GPU."""

from cmm.hopper.config import MatmulDimension, TuningConfig, default_config
from cmm.hopper.matmul import matmul
from cmm.hopper.ring_kernel import all_gather_lhs_matmul, plan_ring

__all__ = ["MatmulDimension", "TuningConfig", "all_gather_lhs_matmul", "default_config", "matmul", "plan_ring"]
