"""From a traced kernel to a running simulation.

JAX hands over a kernel while it lowers a jitted function. What it gets in return
is one host callback per device. At run time the callbacks of all devices meet,
one of them runs the simulation for all, and each takes its outputs home.
"""

from __future__ import annotations

import threading

import numpy as np
from jax import lax
from jax.experimental import io_callback

from cmm.interpret import _jax_private as jax_private, errors, memory
from cmm.interpret.plan import Plan

_MEETING_TIMEOUT_S = 60.0


class Meeting:
    """Where the devices of one kernel call come together."""

    def __init__(self, num_devices: int):
        self.inputs: dict[int, list] = {}
        self.outputs: list | None = None
        self.failed = False
        self.changed = threading.Condition()
        self.num_devices = num_devices
        self._left = 0

    def attend(self, device: int, inputs, run):
        """Brings one device; the last one runs; returns this device's outputs.

        Args:
          device: number of the device.
          inputs: its operands.
          run: takes the operands of all devices, returns the outputs of all.

        Raises:
          LaunchError: other devices did not come, and nobody has said so yet.
        """
        with self.changed:
            self.inputs[device] = inputs
            if len(self.inputs) == self.num_devices:
                self.outputs = run([self.inputs[d] for d in range(self.num_devices)])
                self.changed.notify_all()
            elif not self.changed.wait_for(lambda: self.outputs is not None or self.failed, _MEETING_TIMEOUT_S):
                self.failed = True
                self.changed.notify_all()
                raise errors.LaunchError(
                    f"only {len(self.inputs)} of {self.num_devices} devices reached the"
                    f" kernel within {_MEETING_TIMEOUT_S:g} s. XLA's CPU client probably"
                    " has too few threads: call cmm.devices.find_devices before"
                    " JAX starts its backend."
                )
            return None if self.outputs is None else self.outputs[device]

    def leave(self) -> bool:
        """Tells whether the last device has gone."""
        with self.changed:
            self._left += 1
            return self._left == self.num_devices


def interpret(
    current, /, *args, jaxpr, grid_mapping, mesh, input_output_aliases=(), compiler_params=None, name=None, **_
):
    """Stages one kernel out to the host. `current()` is the active simulation."""
    sizes = jax_private.axis_sizes()
    plan = Plan(
        jaxpr=jaxpr,
        grid_mapping=grid_mapping,
        mesh=mesh,
        input_output_aliases=tuple(input_output_aliases),
        compiler_params=compiler_params,
        name=name,
        axis_sizes=sizes,
    )
    device = 0
    for axis, size in sizes.items():
        device = device * size + lax.axis_index(axis)

    def callback(device, *inputs):
        outputs = current().attend(plan, int(device), [np.asarray(x) for x in inputs])
        if outputs is None:  # A kernel failed, this one or an earlier one.
            outputs = [memory.uninitialized(t.shape, t.dtype) for t in plan.output_types]
        return tuple(outputs)

    # Ordered, so that every device runs the kernels of a program in one order.
    return list(io_callback(callback, tuple(plan.output_types), device, *args, ordered=True))
