"""Kernels lower for GPUs with their recorder, and without one as if there were none."""

import ast
import functools
import importlib.util
import inspect
import re
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from traced_calls import each_kernel

import cmm.interpret as ci
from cmm.hopper import (
    all_gather_lhs_matmul,
    all_gather_lhs_matmul_fast,
    roles,
)
from cmm.hopper.marks import LOADER, Delay
from cmm.trace.offsets import clock_program
from cmm.trace.record import record_events

FUNCTIONS = {"pallas": all_gather_lhs_matmul, "pallas_fast": all_gather_lhs_matmul_fast}


def _lower(function, axis_size=2, out_specs=None):
    return ci.lower_for_cuda(
        function,
        jax.ShapeDtypeStruct((1024 * axis_size, 4096), jnp.float16),
        jax.ShapeDtypeStruct((4096, 4096 * axis_size), jnp.float16),
        mesh_axes={"x": axis_size},
        in_specs=(P("x", None), P(None, "x")),
        out_specs=out_specs or P(None, "x"),
    )


class _WithoutHooks(ast.NodeTransformer):
    """Takes everything out of a module that has to do with recording."""

    def visit_With(self, node):
        self.generic_visit(node)
        return node.body if "marks.span" in ast.unparse(node.items[0]) else node

    def visit_Expr(self, node):
        return None if ast.unparse(node).startswith("marks.mark(") else node


def _without_hooks(module):
    spec = importlib.util.spec_from_file_location(module.__name__, module.__file__)
    stripped = importlib.util.module_from_spec(spec)
    tree = _WithoutHooks().visit(ast.parse(inspect.getsource(module)))
    assert "marks.span" not in ast.unparse(tree) and "marks.mark(" not in ast.unparse(tree)
    exec(compile(ast.fix_missing_locations(tree), module.__file__, "exec"), vars(stripped))
    return stripped


@each_kernel
def test_without_a_recorder_the_kernel_is_as_if_there_were_none(kernel):
    texts = []
    for bare in (False, True, False):  # One line lowers all, for lowered kernels hold the lines that they come from.
        with pytest.MonkeyPatch.context() as patch:
            function = FUNCTIONS[kernel]
            if bare:
                bare_roles, module = _without_hooks(roles), _without_hooks(sys.modules[function.__module__])
                patch.setattr(module, "roles", bare_roles)
                patch.setattr(sys.modules["cmm.hopper.matmul"], "roles", bare_roles)
                function = getattr(module, function.__name__)
            texts.append(_lower(functools.partial(_along_x, function)))
    before, without, after = (re.sub(r'anonymous_?\d*|kernel_hash = "[^"]*"', "", text) for text in texts)
    # JAX numbers the kernels that it lowers; the one before or the one after has a number of as many digits.
    assert without in (before, after)
    assert "clock64" not in before and "globaltimer" not in before


def _along_x(function, lhs, rhs):
    return function(lhs, rhs, "x")


@each_kernel
@pytest.mark.parametrize("axis_size", [2, 4, 8])
def test_recorded_kernel_lowers_for_cuda(kernel, axis_size):
    record = lambda lhs, rhs: record_events(lhs, rhs, "x", kernel, delay=Delay(0, 1, LOADER, 16))
    text = _lower(record, axis_size, (P(None, "x"), P("x")))
    assert text.count("mosaic_gpu_v2") == 1
    assert "clock64" in text and "globaltimer" in text


@pytest.mark.parametrize("axis_size", [2, 3, 8])
def test_clock_kernel_lowers_for_cuda(axis_size):
    device = jax.sharding.AbstractDevice("NVIDIA H200", num_cores=132, platform="gpu")
    mesh = jax.sharding.AbstractMesh((axis_size,), ("x",), abstract_device=device)
    operand = jax.ShapeDtypeStruct((axis_size,), jnp.int32, sharding=jax.sharding.NamedSharding(mesh, P("x")))
    with jax.sharding.use_abstract_mesh(mesh):
        text = clock_program(mesh).trace(operand).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 1 and "clock64" in text
