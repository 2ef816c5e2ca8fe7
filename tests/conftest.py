"""Devices for all tests: eight simulated ones, and the GPUs where there are some."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from cmm import devices

devices.find_devices()


@pytest.fixture(scope="session")
def gpus():
    """All GPUs of this machine; skips the test where there are fewer than two."""
    try:
        found = jax.devices("gpu")
    except RuntimeError:
        found = []
    if len(found) < 2:
        pytest.skip(f"needs 2 GPUs, found {len(found)}")
    return found


@pytest.fixture(scope="session")
def hopper():
    """The first GPU; skips the test where it is not of the Hopper generation."""
    gpu = devices.find_devices()[0]
    if not getattr(gpu, "compute_capability", "").startswith("9."):
        pytest.skip(f"needs a Hopper GPU, found {gpu.device_kind}")
    return gpu


class Case:
    """Operands on a mesh of simulated devices, or of others if given, and the product that they must give."""

    def __init__(self, m_shard, k, n_shard, dtype, mesh_shape=(4,), axis="x", seed=0, devices=None):
        names = ("x", "y")[: len(mesh_shape)]
        count = int(np.prod(mesh_shape))
        self.axis = axis
        self.mesh = jax.make_mesh(mesh_shape, names, devices=(devices or jax.devices("cpu"))[:count])
        self.axis_size = self.mesh.shape[axis]
        self.rows, self.columns = P(axis, None), P(None, axis)
        rng = np.random.default_rng(seed)
        self.lhs = self.put(rng.normal(size=(self.axis_size * m_shard, k)), dtype, self.rows)
        self.rhs = self.put(rng.normal(size=(k, self.axis_size * n_shard)), dtype, self.columns)
        self.lhs64, self.rhs64 = np.asarray(self.lhs, np.float64), np.asarray(self.rhs, np.float64)

    def put(self, values, dtype, spec):
        """Returns `values` as an array of `dtype` on the mesh, sharded as `spec` says."""
        return jax.device_put(jnp.asarray(values, dtype), NamedSharding(self.mesh, spec))

    def program(self, function, compiler_options=None, **options):
        """Returns `function(lhs, rhs, axis, **options)` as a jitted function of the global operands."""
        return jax.jit(
            jax.shard_map(
                lambda lhs, rhs: function(lhs, rhs, self.axis, **options),
                mesh=self.mesh,
                in_specs=(self.rows, self.columns),
                out_specs=self.columns,
            ),
            compiler_options=compiler_options,
        )

    def assert_right(self, out):
        """Checks every element of a result against float64, with the bound that the project promises."""
        k = self.lhs64.shape[1]
        reference, magnitude = self.lhs64 @ self.rhs64, abs(self.lhs64) @ abs(self.rhs64)
        assert out.shape == reference.shape
        # Written out, not taken from cmm.reference: a mistake there must not hide one here.
        bound = float(jnp.finfo(out.dtype).eps) * abs(reference) + 4 * k * 2.0**-23 * magnitude
        error = abs(np.asarray(out, np.float64) - reference)
        assert np.all(error <= bound), f"worst error over bound: {np.max(error / bound)}"


@pytest.fixture
def make_case():
    """The class `Case`, to make operands with."""
    return Case
