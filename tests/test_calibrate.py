"""The machine at hand, measured: plausible numbers that the roofline can use."""

import jax
import pytest

from cmm import calibrate, devices, roofline
from cmm.roofline import Problem


@pytest.mark.parametrize("axis_size", [1, 2])
def test_this_machine(monkeypatch, axis_size):
    mesh = devices.ring_mesh(jax.devices("cpu")[:axis_size])
    found = calibrate.this_machine(mesh, dtype="float32")
    assert found.name == f"this machine: {axis_size} x cpu" and "measured" in found.source
    # A CPU: more than 10 MFLOP/s, less than 100 TFLOP/s.
    assert 1e7 < found.peak_flops_per_s["float32"] < 1e14
    limits = roofline.bounds(Problem(axis_size, 64, 256, 128, "float32"), found)
    assert (limits.t_comms_us > 0) == (axis_size > 1)
    with pytest.raises(ValueError, match="No peak is known for float16 on this machine"):
        roofline.peak_flops_per_s(found, "float16")


def test_rates_by_hand(monkeypatch):
    # 4 us per call: 2 * 256**3 FLOP and 256 * 256 * 2 bytes in that time.
    monkeypatch.setattr(calibrate, "_time_us", lambda function, operands: 4.0)
    found = calibrate.this_machine(devices.ring_mesh(jax.devices("cpu")[:4]), dtype="float16")
    assert found.peak_flops_per_s["float16"] == pytest.approx(2 * 256**3 / 4e-6)
    assert found.link_bytes_per_s == pytest.approx(256 * 256 * 2 / 4e-6)
