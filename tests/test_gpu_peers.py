"""On real GPUs: JAX's example is right where no CTA is made late."""

import pytest

from cmm import devices
from cmm.peers import counting_fault
from cmm.peers.jax_example import PUBLISHED_CONFIG
from cmm.roofline import Problem

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(256, 512, 512), (1024, 4096, 4096)])
def test_right_on_all_gpus(gpus, shape, dtype):
    if not gpus[0].compute_capability.startswith("9."):
        pytest.skip(f"needs Hopper GPUs, found {gpus[0].device_kind}")
    problem = Problem(len(gpus), *shape, dtype)
    setting = counting_fault.Setting(problem, PUBLISHED_CONFIG, gpus[0].core_count, simulated=False)
    result = counting_fault.run_delay(0, 4, devices.ring_mesh(gpus), setting)
    assert (result.wrong_shards, result.shards) == (0, 4 * len(gpus) ** 2)
    assert result.error_over_bound <= 1 and result.not_finite == 0
