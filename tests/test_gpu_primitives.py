"""The kernels that talk, on real GPUs: the same results as in NumPy, call after call."""

import numpy as np
import pytest
from test_primitives import KERNELS, random_blocks, run

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", KERNELS)
def test_many_calls_with_new_blocks(gpus, name):
    function, num_results, oracle = KERNELS[name]
    for num_devices in range(2, len(gpus) + 1):
        if name == "ping_pong" and num_devices % 2:
            continue
        for seed in range(50):
            blocks = random_blocks(num_devices, (64, 64), seed=seed)
            out = run(function, num_results, blocks, found=tuple(gpus))
            np.testing.assert_array_equal(out, oracle(blocks))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", KERNELS)
def test_largest_block(gpus, name, dtype):
    function, num_results, oracle = KERNELS[name]
    blocks = random_blocks(2, (128, 128), dtype)
    np.testing.assert_array_equal(run(function, num_results, blocks, found=tuple(gpus)), oracle(blocks))
