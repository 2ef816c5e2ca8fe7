"""The terms of a call's time add up, a variant that breaks is noted, and programs compute what they should."""

import ast
import json
import pathlib
import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import NamedSharding, PartitionSpec as P

import cmm.interpret as ci
from cmm import devices
from cmm.hopper import all_gather_lhs_matmul_fast
from cmm.overhead import __main__ as command, child, overhead_record, programs
from cmm.overhead.__main__ import main, run
from cmm.overhead.child import Plan
from cmm.overhead.host_trace import HostSpan, split_host_us
from cmm.overhead.programs import Variant
from cmm.overhead.terms import gpu_parts_us, terms
from cmm.peers import program_start, stale_addresses
from cmm.recording import GpuEvent
from cmm.results import Spread
from cmm.roofline import Problem


def recorded(starts=4, calls=2, idle_us=30.0):
    """Events of one GPU: per program a copy from the host and one fill; per call a barrier and a kernel."""
    events, now = [], 0.0

    def add(name, duration_us, gap_us=0.0):
        nonlocal now
        now += gap_us
        events.append(GpuEvent(0, "1", name, now, now + duration_us))
        now += duration_us

    for _ in range(starts):
        add("MemcpyH2D", 2.0, gap_us=idle_us / 2)
        add("loop_broadcast_fusion", 1.0, gap_us=idle_us / 2)
        for _ in range(calls):
            add("MultiGpuBarrierKernelImpl", 5.0, gap_us=0.5)
            add("mosaic_gpu_kernel", 90.0, gap_us=0.5)
    return events


def test_what_a_gpu_recorded_is_split():
    parts = gpu_parts_us(recorded(), starts=4, calls=2)
    expected = {"kernel": 90.0, "barrier": 5.0, "fill": 0.5, "gaps": 1.0, "addresses": 2.0, "idle": 30.0}
    assert parts == pytest.approx(expected)


def test_events_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="do not divide into 4"):
        gpu_parts_us(recorded()[1:], starts=4, calls=2)
    with pytest.raises(ValueError, match="no matmul kernel"):
        gpu_parts_us([GpuEvent(0, "1", "fill", t, t + 1.0) for t in range(4)], starts=4, calls=1)


@pytest.mark.parametrize("start_us, waits_us, rest_us", [(350.0, 78.5, 5.0), (150.0, 0.0, 83.5)])
def test_terms_add_up_to_the_wall_time(start_us, waits_us, rest_us):
    parts = gpu_parts_us(recorded(), starts=4, calls=2)  # 96.5 µs per call on the GPU.
    found = terms(parts, Spread(180.0, 178.0, 184.0), start_us, calls=2)
    assert sum(term.time_us for term in found) == pytest.approx(180.0)
    times = {term.name: term.time_us for term in found}
    assert times["start of a program"] == pytest.approx(waits_us)
    assert times["rest"] == pytest.approx(rest_us)


def test_the_host_is_split():
    names = ["Thunks::Prepare", "AcquireCollectiveCliques", "AcquireCollectiveMemory", "Thunks::Initialize"]
    one = [HostSpan("[1] GpuExecutable::ExecuteThunks", 100.0), *(HostSpan(name, 10.0) for name in names)]
    parts = split_host_us([*one, *one, HostSpan("somebody else", 7.0)], executions=2)
    assert list(parts.values()) == pytest.approx([10.0, 10.0, 10.0, 10.0, 0.0, 60.0])
    with pytest.raises(ValueError, match="3 spans"):
        split_host_us(one, executions=3)


_FAKE = """
import json, os, sys, time
say = lambda event, **fields: print(json.dumps({"event": event} | fields), flush=True)
done = json.load(open(sys.argv[1]))["done"]
say("machine", devices=2, machine={"device_kind": "none"}, versions={"jax": "0"}, simulated=True)
spread = {"median": 1.0, "p10": 1.0, "p90": 1.0}
times = dict.fromkeys(("wall_us", "returns_us", "idle_returns_us", "idle_us"), spread) | {"calls": 1}
for name in ("good", "crashes", "hangs", "late"):
    if name not in done:
        say("begin", name=name, title=name)
        if name == "crashes":
            os.abort()
        if name == "hangs":
            time.sleep(60)
        say("measured", name=name, title=name, times=times)
say("end")
"""


def test_a_variant_that_crashes_or_hangs_is_noted_and_the_next_one_measured():
    plan = Plan(None, 16, 64, 64, "float16")
    measurement = run(plan, report=lambda text: None, silence_s=2.0, child=[sys.executable, "-c", _FAKE])
    status = {name: variant["status"] for name, variant in measurement.variants.items()}
    assert status == {"good": "measured", "crashes": "failed", "hangs": "failed", "late": "measured"}
    assert "SIGABRT" in measurement.variants["crashes"]["reason"]
    assert "silence" in measurement.variants["hangs"]["reason"]
    assert len(overhead_record.variant_rows(measurement)) == 2


def test_a_process_that_finds_no_devices_ends_it():
    plan = Plan(None, 16, 64, 64, "float16")
    child = [sys.executable, "-c", "raise SystemExit(3)"]
    assert run(plan, report=lambda text: None, silence_s=5.0, child=child) is None


def test_the_command_on_simulated_devices(tmp_path):
    arguments = "--simulate --devices 2 --m-shard 16 --k 64 --n-shard 64 --limit-s 60".split()
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.iterdir()
    record = overhead_record.load(path)
    (measurement,) = record.measurements
    assert path.name == overhead_record.file_name(record) == "overhead_simulated_d2_m16_k64_n64_float16.json"
    assert measurement.simulated
    assert {variant["status"] for variant in measurement.variants.values()} == {"measured", "skipped"}
    assert measurement.spread("gather_8").median > 0
    assert measurement.spread("kernel_1") is None
    assert not measurement.terms(1)
    overhead_record.save(record, tmp_path / "again.json")
    assert json.loads(path.read_text()) == json.loads((tmp_path / "again.json").read_text())


@pytest.mark.parametrize("form, calls", [("chain", 3), ("donated", 1), ("replicated", 1), ("loop", 3), ("scan", 3)])
def test_every_form_computes_the_product(form, calls):
    mesh = devices.ring_mesh(jax.devices("cpu")[:2])
    problem = Problem(2, 16, 32, 32, "float32")
    started = programs.build(Variant("", "naive", calls, form), problem, mesh)
    pairs = [devices.random_operands(problem, mesh, seed) for seed in range(calls)]
    lhs, rhs = zip(*pairs)
    expected = {
        "chain": [np.asarray(a) @ np.asarray(b) for a, b in pairs],
        "scan": [np.asarray(lhs[0]) @ np.asarray(rhs[-1])],
    }.get(form, [np.asarray(lhs[0]) @ np.asarray(rhs[0])])
    for _ in range(2):  # The donated result is the next one's.
        for result, right in zip(started.start(), expected, strict=True):
            np.testing.assert_allclose(result, right, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_variants_fit_the_number_of_devices(count):
    found = programs.variants(count)
    assert {f"kernel_{calls}" for calls in programs.CALLS} <= set(found)
    assert ("stand_in_1" in found) == ("tiny_psum" in found) == (count > 1)
    known = {"gemm_only", "stand_in", "naive", "pallas_fast", *program_start.PROGRAMS}
    assert {variant.function for variant in found.values()} <= known


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_the_kernels_that_do_nothing_do_not_hang(seed):
    mesh = devices.ring_mesh(jax.devices("cpu")[:3])
    x = jax.device_put(jnp.arange(3 * 64 * 64, dtype=jnp.float32).reshape(-1, 64), NamedSharding(mesh, P("x")))
    with ci.simulate(seed=seed) as sim:
        for collective in (False, True):
            copy = lambda x, collective=collective: program_start.kernel(x, collective)
            f = jax.jit(jax.shard_map(copy, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False))
            np.testing.assert_array_equal(sim.run(f, x), x)
    problem = Problem(3, 16, 32, 32, "float16")
    lhs, rhs = devices.random_operands(problem, mesh, 0)
    specs = (P("x", None), P(None, "x"))
    f = jax.shard_map(
        lambda a, b: programs.stand_in(a, b, "x"), mesh=mesh, in_specs=specs, out_specs=P(None, "x"), check_vma=False
    )
    with ci.simulate(seed=seed) as sim:
        assert sim.run(jax.jit(f), lhs, rhs).shape == (48, 96)


@pytest.mark.parametrize("reproduction", [program_start, stale_addresses])
def test_reproductions_stand_alone(reproduction):
    source = pathlib.Path(reproduction.__file__).read_text()
    assert len(source.splitlines()) < 110
    for node in ast.walk(ast.parse(source)):
        names = [node.module] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        assert not any(name.startswith("cmm") for name in names)


def lowered(calls):
    """StableHLO of a program of the fast kernel on two GPUs, without the bytecode of the kernel."""
    shapes = [jax.ShapeDtypeStruct((2048, 4096), jnp.float16), jax.ShapeDtypeStruct((4096, 8192), jnp.float16)]
    rows, columns = P("x", None), P(None, "x")

    def program(*operands):
        pairs = [(operands[2 * i], operands[2 * i + 1]) for i in range(calls)]
        call = lambda lhs, rhs: all_gather_lhs_matmul_fast(lhs, rhs, "x")
        return programs.chained(call)(pairs) if calls > 1 else call(*pairs[0])

    specs = (rows, columns) * calls
    out = [columns] * calls if calls > 1 else columns
    text = ci.lower_for_cuda(program, *shapes * calls, mesh_axes={"x": 2}, in_specs=specs, out_specs=out)
    return re.sub(r'module = "(?:[^"\\]|\\.)*"', 'module = ""', text)


# The kernel, the zeros of its semaphores, and what moves no data.
_NO_COPY = {"custom_call", "constant", "broadcast_in_dim"}
_NO_COPY |= {"optimization_barrier", "manual_computation", "sharding_constraint"}


@pytest.mark.parametrize("calls", [1, 3])
def test_operands_reach_the_kernel_uncopied(calls):
    text = lowered(calls)
    operations = set(re.findall(r"= \"?(?:stablehlo|sdy|chlo)\.(\w+)", text))
    assert operations <= _NO_COPY, operations
    kernels = re.findall(r"custom_call @mosaic_gpu_v2\((.*?)\) (\{.*)", text)
    assert len(kernels) == 1  # Lowered once, however often it is called.
    operands, attributes = kernels[0]
    lhs, rhs, semaphores = operands.split(", ")
    assert lhs.startswith("%arg") and rhs.startswith("%arg")
    # Semaphores alone are an operand that the kernel changes, and zeros are what they start from.
    assert re.search(rf"{semaphores} = stablehlo.broadcast_in_dim %\w+, .* tensor<\d+xi32>", text)
    assert attributes.count("output_operand_alias<") == 1
    assert "operand_index = 2" in attributes
    assert "skip_device_barrier = false" in attributes
    assert "uses_xla_collective_metadata = true" in attributes


def test_semaphores_cannot_be_operands():
    """Else a kernel could bring its own ones, which outlive the call, and do without the barrier."""

    def body(x_ref, semaphore_ref, out_ref):
        pl.semaphore_signal(semaphore_ref.at[0], device_id={"x": 1 - lax.axis_index("x")})
        pl.semaphore_wait(semaphore_ref.at[0])

    kernel = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((64, 64), jnp.float32))
    shapes = jax.ShapeDtypeStruct((128, 64), jnp.float32), jax.ShapeDtypeStruct((128,), jnp.int32)
    with pytest.raises(ValueError, match="Must signal semaphores"):
        ci.lower_for_cuda(kernel, *shapes, mesh_axes={"x": 2}, in_specs=(P("x"), P("x")), out_specs=P("x"))


@pytest.mark.parametrize("visible, count, shown", [(None, 2, "0,1"), ("3,5", 2, "3,5"), ("3,5", 1, "3")])
def test_processes_see_gpus_that_the_user_shows(monkeypatch, visible, count, shown):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert command._environment(count) == [f"CUDA_VISIBLE_DEVICES={shown}"]


@pytest.mark.parametrize("visible, count", [("3", 2), ("", 1)])
def test_no_other_gpus_are_taken(monkeypatch, visible, count):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ValueError, match="asked for"):
        command._environment(count)


def test_a_wrong_result_is_a_failure(monkeypatch, capsys):
    def build(variant, problem, mesh):
        def check():
            raise programs.WrongResult("Result 0 differs")

        return programs.Started(lambda: [], check)

    monkeypatch.setattr(child.programs, "build", build)
    built = child._built(child.Plan(1, 64, 64, 64, "float16"), None, types.SimpleNamespace(size=1))
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert not built and {event["event"] for event in events} == {"begin", "failed"}
