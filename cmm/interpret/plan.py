"""What a kernel wants: how many devices, CTAs and threads, which operands."""

from __future__ import annotations

import math

import jax
import numpy as np

from cmm.interpret import _jax_private as jax_private
from cmm.interpret.evaluate import Program, check_supported, sub_jaxprs


def _has_warps(jaxpr) -> bool:
    return any(e.primitive.name == "mpmd_map" or any(map(_has_warps, sub_jaxprs(e))) for e in jaxpr.eqns)


class Plan:
    """A kernel and the machine that it wants; made once per lowering.

    Attributes:
      name: the kernel's name.
      num_devices, num_ctas, num_threads, ctas_per_cluster: how much runs at once.
      operand_names, operand_types: of inputs and outputs, in order.
      outputs: which operands are outputs, as a slice.
      aliases: operand number of an output -> of the input that it shares.
    """

    def __init__(self, *, jaxpr, grid_mapping, mesh, input_output_aliases, compiler_params, name, axis_sizes):
        if mesh is None or type(mesh).__name__ != "Mesh":
            raise NotImplementedError("only kernels of plgpu.kernel, or core_map over a plgpu.Mesh, are simulated")
        check_supported(jaxpr)
        self.jaxpr = jaxpr
        self.program = Program()
        self.name = name or "kernel"
        self.mesh = mesh
        self.axis_sizes = axis_sizes
        self.num_devices = math.prod(axis_sizes.values())
        self.grid = tuple(mesh.grid) + tuple(mesh.cluster or ())
        self.grid_names = tuple(mesh.grid_names) + tuple(mesh.cluster_names or ())
        self.num_ctas = math.prod(self.grid)
        self.ctas_per_cluster = math.prod(mesh.cluster or ())
        self.num_threads = mesh.num_threads or 1
        self.skips_device_barrier = bool(getattr(compiler_params, "skip_device_barrier", False))
        self.has_warps = _has_warps(jaxpr)
        n_in, n_out = grid_mapping.num_inputs, grid_mapping.num_outputs
        if len(jaxpr.invars) != n_in + n_out:
            raise NotImplementedError("kernel arguments beyond inputs and outputs; use scratch_types= of plgpu.kernel")
        captured = [v.aval.str_short() for v in jaxpr.invars if not jax_private.is_ref(v.aval)]
        if captured:
            raise ValueError(
                f"The kernel uses {', '.join(captured)} that was computed outside of it, and so it would not run on a "
                "GPU either. Compute it inside the kernel, or pass it as an operand."
            )
        self.operand_names = [f"input {i}" for i in range(n_in)] + [f"output {i}" for i in range(n_out)]
        self.operand_types = [(v.aval.shape, v.aval.dtype) for v in jaxpr.invars]
        self.outputs = slice(n_in, n_in + n_out)
        self.aliases = {n_in + o: i for i, o in input_output_aliases}
        self._numbers: dict[int, int] = {}

    @property
    def output_types(self):
        return [jax.ShapeDtypeStruct(*t) for t in self.operand_types[self.outputs]]

    def number_of(self, eqn) -> int:
        """A small number for an equation; equations live as long as the plan."""
        return self._numbers.setdefault(id(eqn), len(self._numbers))

    def coords(self, device: int, cta: int, thread: int) -> dict:
        """Index by axis name."""
        coords = (
            dict(zip(self.axis_sizes, map(int, np.unravel_index(device, tuple(self.axis_sizes.values())))))
            if self.axis_sizes
            else {}
        )
        if self.grid:
            coords.update(zip(self.grid_names, map(int, np.unravel_index(cta, self.grid))))
        if self.mesh.thread_name is not None:
            coords[self.mesh.thread_name] = thread
        return coords

    def program_id(self, thread, axis: int) -> int:
        names = self.grid_names + (self.mesh.thread_name,)
        return thread.coords[names[axis]]

    def logical_device(self, coords: dict, device_id, kind) -> int:
        """The device number that a device id means to a thread at `coords`.

        A dictionary replaces some of the thread's own mesh coordinates; a plain
        number is the coordinate on a mesh of one axis, or a logical number.
        """
        sizes = self.axis_sizes
        where = {name: coords[name] for name in sizes}
        if isinstance(device_id, dict):
            for names, value in device_id.items():
                if isinstance(names, tuple):
                    shape = [sizes[n] for n in names]
                    for n, v in zip(names, np.unravel_index(int(value), shape)):
                        where[n] = int(v)
                else:
                    where[names] = int(value)
            unknown = set(where) - set(sizes)
            if unknown:
                raise ValueError(f"device id names {unknown}, which are no mesh axes")
        elif getattr(kind, "name", "MESH") == "LOGICAL":
            return self._checked(int(device_id), self.num_devices, "device id")
        else:
            ids = device_id if isinstance(device_id, tuple) else (device_id,)
            if len(ids) != len(sizes):
                raise ValueError(
                    f"{len(ids)} device ids for a mesh of {len(sizes)} axes; name the axis: {{axis_name: index}}"
                )
            where = dict(zip(sizes, map(int, ids)))
        number = 0
        for name, size in sizes.items():
            number = number * size + self._checked(where[name], size, f"index on axis {name}")
        return number

    @staticmethod
    def _checked(value: int, size: int, what: str) -> int:
        if not 0 <= value < size:
            raise ValueError(f"{what} {value} is not in 0..{size - 1}")
        return value
