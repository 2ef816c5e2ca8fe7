"""On real GPUs: the same promises as on simulated devices, and those that only GPUs can break."""

import numpy as np
import pytest

import cmm
from cmm import recording

pytestmark = pytest.mark.gpu

# The kernels for Hopper GPUs take other dtypes and shapes; they have tests of their own.
PROGRAMS = {name: (name, None) for name, method in cmm.METHODS.items() if not method.needs_hopper}
PROGRAMS |= {"ring_copy_engines": ("ring", cmm.COPY_ENGINE_OPTIONS)}


def _run(case, program, **options):
    method, compiler_options = PROGRAMS[program]
    run = case.program(cmm.all_gather_matmul, compiler_options, method=method, **options)
    return lambda: run(case.lhs, case.rhs)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_product(make_case, gpus, program, dtype):
    sizes = range(1, len(gpus) + 1) if dtype == "float16" else [len(gpus)]
    for axis_size in sizes:
        for shape in ((33, 130, 17), (256, 512, 384)):
            case = make_case(*shape, dtype, (axis_size,), devices=gpus)
            case.assert_right(_run(case, program)())


@pytest.mark.parametrize("axis", ["x", "y"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_one_axis_of_a_mesh_of_two(make_case, gpus, program, axis):
    if len(gpus) < 4:
        pytest.skip(f"needs 4 GPUs, found {len(gpus)}")
    case = make_case(64, 96, 32, "float16", (2, 2), axis, devices=gpus)
    case.assert_right(_run(case, program)())


@pytest.mark.parametrize("program", PROGRAMS)
def test_float32_is_not_tf32(make_case, gpus, program):
    case = make_case(256, 1024, 256, "float32", (len(gpus),), devices=gpus)
    reference = case.lhs64 @ case.rhs64

    def error(**options):
        out = np.asarray(_run(case, program, **options)(), np.float64)
        return np.linalg.norm(out - reference) / np.linalg.norm(reference)

    assert error() < 2e-6
    # The same measure tells TF32 apart, so the line above can fail.
    assert error(precision="default") > 1e-4


@pytest.mark.parametrize("program", PROGRAMS)
def test_new_operands_many_times(make_case, gpus, program):
    # A transfer that is read too early shows as an error that moves.
    for seed in range(20):
        case = make_case(512, 1024, 512, "float16", (len(gpus),), seed=seed, devices=gpus)
        run = _run(case, program)
        first = np.asarray(run())
        case.assert_right(first)
        for _ in range(5):
            np.testing.assert_array_equal(np.asarray(run()), first)


def test_recording_sees_every_gpu_and_tells_transfers_from_products(make_case, gpus):
    case = make_case(512, 1024, 512, "float16", (len(gpus),), devices=gpus)
    run = _run(case, "naive")
    run().block_until_ready()
    events = recording.record(lambda: [run() for _ in range(4)])
    for device in range(len(gpus)):
        mine = [event for event in events if event.device == device]
        assert len([event for event in mine if event.role == "matmul"]) == 4
        assert len([event for event in mine if event.role == "transfer"]) == 4
        assert all(call for call in recording.split_calls(mine, 4))
