"""What ptxas says about the Hopper kernels: no product waits for the one before, and no register is spilled.

ptxas tells when kernels are compiled, in a process that was started with `MOSAIC_GPU_DUMP_PTXAS=1`. So this file is
also the program of that process. One GPU is enough: it is its own neighbour, see `cmm.hopper.loopback`.
"""

import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from cmm import devices, hopper
from cmm.hopper.loopback import looped_back, plan_loop

pytestmark = pytest.mark.gpu

# One tile of a step for each CTA, two, rounds that span steps, and halves of tiles: each makes other loops of a kernel.
SHAPES = [(1024, 4096, 4096), (2048, 4096, 4096), (2048, 4096, 7168), (128, 4096, 4096), (1280, 4096, 4096)]
SERIALIZED, SPILLS = "wgmma.mma_async instructions are serialized", re.compile(r"\b[1-9]\d* bytes spill stores")


@pytest.mark.usefixtures("hopper")
def test_products_are_not_serialized_and_registers_not_spilled():
    child = subprocess.run(
        [sys.executable, __file__],
        env=os.environ | {"MOSAIC_GPU_DUMP_PTXAS": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    said = child.stdout + child.stderr
    assert child.returncode == 0, said[-3000:]
    assert said.count("Compiling entry function") >= 3 * len(SHAPES), said[-3000:]
    assert SERIALIZED not in said
    assert not SPILLS.findall(said)


def _compile_all():
    gpu = devices.find_devices()[0]
    for m, k, n in SHAPES:
        lhs, rhs = (jax.device_put(jnp.zeros(shape, "float16"), gpu) for shape in ((m, k), (k, n)))
        jax.block_until_ready(jax.jit(hopper.matmul)(lhs, rhs))
        for kernel in hopper.KERNELS:
            plan = plan_loop(kernel, 2, m, k, n, "float16", gpu, gpu.core_count)
            jax.block_until_ready(looped_back(kernel, plan, 2, "float16", gpu)(lhs, rhs))


if __name__ == "__main__":
    _compile_all()
