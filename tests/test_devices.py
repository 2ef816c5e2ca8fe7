"""Finding devices in fresh processes: before and after JAX has started its backend."""

import os
import pathlib
import subprocess
import sys

import pytest

import cmm
from cmm import devices


def _python(code, **environment):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_", "PJRT_"))}
    root = str(pathlib.Path(cmm.__file__).parents[1])
    environment = clean | {"PYTHONPATH": root, "JAX_PLATFORMS": "cpu"} | environment
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)


FIND = "from cmm import devices; print(len(devices.find_devices({})))"


@pytest.mark.parametrize("count, found", [("", 8), (3, 3), (12, 12)])
def test_counts(count, found):
    assert _python(FIND.format(count)).stdout.split() == [str(found)]


def test_user_settings_are_respected():
    assert _python(FIND.format(""), JAX_NUM_CPU_DEVICES="4").stdout.split() == ["4"]
    assert _python(FIND.format(""), XLA_FLAGS="--xla_force_host_platform_device_count=2").stdout.split() == ["2"]


def test_backend_that_started_too_early():
    done = _python("import jax; jax.devices();" + FIND.format(4))
    assert "RuntimeError: JAX started its backend with 1 simulated device(s), 4 are needed." in done.stderr


def test_more_simulated_devices_than_there_are():
    with pytest.raises(RuntimeError, match="with 8 simulated device"):
        devices.simulated_devices(10_000)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        devices.find_devices(0)


def test_many_calls_in_flight_do_not_hang():
    # On few cores XLA's default thread pool lets two programs starve each other of threads, and aborts.
    code = """
import jax
from jax import lax
from jax.sharding import PartitionSpec as P
from cmm import devices
mesh = devices.ring_mesh(devices.find_devices(8))
f = jax.jit(jax.shard_map(lambda x: lax.psum(x, "x"), mesh=mesh, in_specs=P("x"), out_specs=P()))
x = jax.device_put(jax.numpy.ones(8), jax.NamedSharding(mesh, P("x")))
print(sum(float(y[0]) for y in [f(x) for _ in range(100)]))
"""
    done = _python(code)
    assert done.stdout.split() == ["800.0"], done.stderr
