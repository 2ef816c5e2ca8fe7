"""Which rungs run, which are skipped and why, and what their times are compared with."""

import collections
import dataclasses
import itertools
import threading

import jax
import pytest

from cmm import devices, interpret, job, report, rounds, rungs
from cmm.completeness import IncompleteRecording
from cmm.measure import RecordedCall
from cmm.peers import jax_example
from cmm.product import local_matmul
from cmm.protocol import Protocol, order_in_round, order_in_words
from cmm.reference import accuracy, make_reference
from cmm.roofline import Problem
from cmm.rungs import GEMM_ONLY, Rung, in_shard_map

PROBLEM = Problem(2, 4, 8, 4)
PROTOCOL = Protocol(3, 2, recorded_starts=2, short_chain=1, long_chain=2, short_starts=1, long_starts=2)


def _gathered(lhs, rhs, _):
    return local_matmul(lhs, rhs, lhs.dtype)


def _naive(lhs, rhs, axis):
    return rungs.METHODS["naive"].function(lhs, rhs, axis)


def _fails_with(error):
    def build(problem, mesh, operands):
        raise error

    return build


def _record(monkeypatch, times_us):
    """Lets simulated devices pass for GPUs that record call and kernel times: each rung's, round by round."""
    names, seen = list(times_us), itertools.count()

    def recorded_chains(programs, starts, mark, gpus):
        mark()
        for program in programs:
            program.wait(program.start_chain(program.operands))
        # One start is recorded before the rounds, to see whether it can be.
        if starts != PROTOCOL.recorded_starts:
            return [RecordedCall(1, 1, {})] * len(programs)
        index = next(seen)
        return [
            RecordedCall(*times_us[names[place]][index], {}, {"odd_kernel(int)": 2.5})
            for place in order_in_round(len(programs), index)
        ]

    monkeypatch.setattr(job, "is_simulated", lambda devices: False)
    monkeypatch.setattr(rounds, "recorded_chains", recorded_chains)


def _ladder(*more, **options):
    mesh = devices.ring_mesh(jax.devices("cpu")[:2])
    run, _ = job.run_ladder(PROBLEM, mesh, rungs=(GEMM_ONLY, *more), protocol=PROTOCOL, **options)
    return run


@pytest.mark.parametrize("error", [ValueError("no"), NotImplementedError("no"), ImportError("no")])
@pytest.mark.parametrize("names", [None, ("odd",)])
def test_what_says_that_it_cannot_run_is_skipped(error, names):
    result = _ladder(Rung("odd", "odd", _fails_with(error)), names=names).method("odd")
    assert (result.status, result.reason) == ("skipped", "no")


def test_what_dies_is_not_skipped_unless_it_is_a_peer_that_nobody_asked_for():
    dies = Rung("odd", "odd", _fails_with(RuntimeError("broken")))
    peer = dataclasses.replace(dies, peer=True)
    with pytest.raises(RuntimeError, match="broken"):
        _ladder(dies)
    with pytest.raises(RuntimeError, match="broken"):
        _ladder(peer, names=("odd",))
    result = _ladder(peer).method("odd")
    assert (result.status, result.reason) == ("skipped", "RuntimeError: broken")
    # The same holds for one that dies when it runs.
    program = in_shard_map(_naive)
    dies = Rung("odd", "odd", lambda *args: dataclasses.replace(program(*args), start=lambda lhs, rhs: lhs.broken))
    assert _ladder(dataclasses.replace(dies, peer=True)).method("odd").reason.startswith("AttributeError: ")
    with pytest.raises(AttributeError):
        _ladder(dies)


def test_the_roof_cannot_be_skipped_or_left_out(monkeypatch):
    mesh = devices.ring_mesh(jax.devices("cpu")[:2])
    with pytest.raises(ValueError, match="GEMM_ONLY"):
        job.run_ladder(PROBLEM, mesh, rungs=rungs.RUNGS[2:])
    with pytest.raises(ValueError, match="magic"):
        job.run_ladder(PROBLEM, mesh, ("magic",))
    broken = dataclasses.replace(GEMM_ONLY, build=_fails_with(ValueError("broken")))
    monkeypatch.setattr(job, "GEMM_ONLY", broken)
    with pytest.raises(ValueError, match="broken"):
        job.run_ladder(PROBLEM, mesh, rungs=(broken,), protocol=PROTOCOL)


def test_ratios_are_per_round_and_to_the_faster_roof(monkeypatch):
    # Call and kernel time of each rung in three rounds. In the second round the other roof is the slower one.
    times_us = {
        "gemm_only": [(20, 16), (20, 16), (20, 16)],
        "other": [(10, 8), (30, 24), (10, 8)],
        "method": [(20, 12), (30, 48), (10, 16)],
        "unknown": [(40, 0), (40, 0), (40, 0)],
    }
    _record(monkeypatch, times_us)
    run = _ladder(
        Rung("other", "other roof", in_shard_map(_gathered, gathered=True), gathered=True),
        Rung("method", "method", in_shard_map(_naive)),
        Rung("unknown", "kernels of unknown names", in_shard_map(_naive)),
    )
    assert run.gemm_only == "other"
    method, unknown = run.method("method"), run.method("unknown")
    assert (method.call_time_us.median, method.kernel_time_us.median) == (20, 16)
    # 20 / 10, 30 / 30, 10 / 10, and 12 / 8, 48 / 24, 16 / 8.
    assert (method.ratio_to_gemm_only.median, method.kernel_ratio_to_gemm_only.median) == (1, 2)
    assert run.method("other").ratio_to_gemm_only.median == 1
    assert unknown.kernel_time_us is None and unknown.kernel_ratio_to_gemm_only.median == 0 and unknown.is_incomplete
    assert unknown.details == "recorded beside matmul kernels that are known: odd_kernel 2.5 µs"
    assert not method.details


def test_a_wrong_matmul_is_no_roof(monkeypatch):
    _record(monkeypatch, {"gemm_only": [(20, 20)] * 3, "other": [(10, 10)] * 3})
    wrong = in_shard_map(lambda lhs, rhs, _: 1.1 * _gathered(lhs, rhs, _), gathered=True)
    assert _ladder(Rung("other", "wrong roof", wrong, gathered=True)).gemm_only == "gemm_only"


def test_a_peer_that_the_profiler_does_not_see_is_skipped(monkeypatch):
    _record(monkeypatch, {"gemm_only": [(20, 20)] * 3})
    seen = rounds.recorded_chains
    unseen = in_shard_map(_naive)

    def recorded_chains(programs, starts, mark, gpus):
        calls = seen([program for program in programs if program.wait is jax.block_until_ready], starts, mark, gpus)
        error = RuntimeError("The profiler recorded no GPU events.")
        return calls + [error] * (len(programs) - len(calls))

    monkeypatch.setattr(rounds, "recorded_chains", recorded_chains)
    odd = Rung("odd", "odd", lambda *args: dataclasses.replace(unseen(*args), wait=lambda results: None), peer=True)
    assert _ladder(odd).method("odd").reason == "RuntimeError: The profiler recorded no GPU events."
    with pytest.raises(RuntimeError, match="recorded no GPU events"):
        _ladder(odd, names=("odd",))


def test_programs_are_recorded_one_by_one_and_the_record_says_so_if_marks_are_lost(monkeypatch):
    _record(monkeypatch, {"gemm_only": [(20, 20)] * 3, "method": [(30, 25)] * 3})
    seen, failing = rounds.recorded_chains, iter([False, False, True, False])

    def recorded_chains(programs, starts, mark, gpus):
        calls = seen(programs, starts, mark, gpus)
        if next(failing):
            raise RuntimeError("2 marks are missing")
        return calls

    monkeypatch.setattr(rounds, "recorded_chains", recorded_chains)
    monkeypatch.setattr(rounds, "recorded_chain", lambda program, starts, gpus: RecordedCall(40, 20, {}))
    run = _ladder(Rung("method", "method", in_shard_map(_naive)))
    assert run.rounds["method"][0].call_us == [30, 40, 30] and run.rounds["gemm_only"][0].call_us == [20, 40, 20]
    assert run.method("method").details == "recorded in sessions of its own in some rounds, since: 2 marks are missing"


@pytest.mark.parametrize("at_first", [True, False])
def test_a_method_that_is_never_recorded_completely_has_no_number(monkeypatch, at_first):
    _record(monkeypatch, {"gemm_only": [(20, 20)] * 99, "method": [(30, 25)] * 99})
    seen = rounds.recorded_chains

    def recorded_chains(programs, starts, mark, gpus):
        calls = seen(programs, starts, mark, gpus)
        if at_first == (starts == 1):
            error = IncompleteRecording("14 products")
            calls = [error if program.details == "lossy" else call for program, call in zip(programs, calls)]
        return calls

    monkeypatch.setattr(rounds, "recorded_chains", recorded_chains)
    build = in_shard_map(_naive)
    lossy = Rung("method", "method", lambda *args: dataclasses.replace(build(*args), details="lossy"))
    run = _ladder(lossy)
    method, times = run.method("method"), run.rounds["method"][0]
    assert method.status == "measured" and method.is_incomplete and "14 products" in method.details
    assert method.call_time_us is method.kernel_time_us is method.ratio_to_gemm_only is None
    assert method.kernel_ratio_to_gemm_only is None and (times.call_us, times.kernel_us) == ([], [])
    assert len(times.wall_us) == PROTOCOL.rounds and run.method("gemm_only").call_time_us.median == 20
    assert any("incomplete" in row and "method" in row for row in report.ladder_rows(run))


def test_without_a_complete_recording_of_gemm_only_there_are_no_ratios(monkeypatch):
    _record(monkeypatch, {"gemm_only": [(20, 20)] * 99})
    lost = lambda programs, starts, mark, gpus: [IncompleteRecording("14 products")] * len(programs)
    monkeypatch.setattr(rounds, "recorded_chains", lost)
    monkeypatch.setattr(job, "time_on_gpus", lambda *args: pytest.fail("minutes for nothing"))
    with pytest.raises(RuntimeError, match="GEMM only cannot be timed.*14 products"):
        _ladder()


@pytest.mark.parametrize("count, number", [(3, 20), (8, 8), (8, 24), (9, 8), (9, 18), (9, 24), (11, 24)])
def test_the_record_says_how_often_methods_follow_each_other(count, number):
    names = [f"m{index}" for index in range(count)]
    follows = collections.Counter(
        pair for index in range(number) for pair in itertools.pairwise(order_in_round(count, index))
    )
    often = [follows[pair] for pair in itertools.permutations(range(count), 2)]
    words = f"{min(often)} to {max(often)} times" if min(often) < max(often) else f"{min(often)} times"
    words = "once" if (count, number) == (8, 8) else words
    expected = f"in {number} rounds each method follows each other one {words}"
    protocol = dataclasses.replace(PROTOCOL, rounds=number)
    assert expected in protocol.in_words(names) and "equally" not in protocol.in_words(names)
    # Several processes go on with the numbers of rounds.
    parts = [(names, range(number // 3)), (names, range(number // 3, number))]
    assert order_in_words(parts).endswith(expected)
    assert ":" not in order_in_words([(names[:1], range(number))])


@pytest.mark.parametrize("count", [1, 2, 8, 9])
def test_each_method_follows_each_other_equally_often(count):
    rounds_for_all = count if count % 2 == 0 else 2 * count
    orders = [order_in_round(count, index) for index in range(rounds_for_all)]
    pairs = collections.Counter(pair for order in orders for pair in itertools.pairwise(order))
    places = collections.Counter(place for order in orders for place in enumerate(order))
    assert all(sorted(order) == list(range(count)) for order in orders)
    assert len(pairs) == count * (count - 1) and len(set(pairs.values())) <= 1
    assert len(places) == count**2 and len(set(places.values())) == 1


def test_processes_go_on_with_the_order_of_the_rounds(monkeypatch):
    asked = []
    monkeypatch.setattr(rounds, "order_in_round", lambda count, index: asked.append(index) or list(range(count)))
    assert _ladder(first_round=8).first_round == 8
    assert asked == [8, 9, 10]


def test_a_reference_is_computed_once_per_operand_pair(monkeypatch):
    made = []
    monkeypatch.setattr(job, "make_reference", lambda *args: made.append(args[:2]) or make_reference(*args))
    run = _ladder(*(Rung(name, name, in_shard_map(_naive)) for name in "abc"))
    assert len(made) == PROTOCOL.operand_sets
    assert all(result.error_over_bound <= 1 for result in run.methods)


def test_only_what_times_no_products_is_compiled_beside_others():
    compiled = {}

    def build_as(name):
        class Lowered:
            def compile(self):
                compiled[name] = threading.current_thread()

        build = in_shard_map(_naive)
        return lambda *args: dataclasses.replace(build(*args), lowered=[Lowered()])

    _ladder(Rung("products", "", build_as("products")), Rung("kernel", "", build_as("kernel"), beside=True))
    assert compiled["products"] is threading.main_thread() is not compiled["kernel"]
    beside = {rung.name for rung in rungs.RUNGS if rung.beside}
    assert beside == {"pallas", "pallas_fast", "jax_example"}


def test_what_cannot_be_compiled_is_skipped_if_it_is_a_peers():
    class Lowered:
        def compile(self):
            raise RuntimeError("ptxas: " + 1000 * "!")

    build = in_shard_map(_naive)
    for beside in (False, True):
        odd = Rung(
            "odd", "", lambda *args: dataclasses.replace(build(*args), lowered=[Lowered()]), peer=True, beside=beside
        )
        reason = _ladder(odd).method("odd").reason
        assert reason.startswith("RuntimeError: ptxas: !!!") and len(reason) <= 600
        with pytest.raises(RuntimeError, match="ptxas"):
            _ladder(dataclasses.replace(odd, peer=False))


def test_hopper_kernels_are_skipped_on_other_gpus():
    class Device:
        platform, compute_capability, device_kind = "gpu", "8.0", "NVIDIA A100"

    for rung in rungs.RUNGS:
        if rung.needs == "Hopper GPUs":
            with pytest.raises(job._Skipped, match="needs Hopper GPUs, found NVIDIA A100"):
                job._check_devices(rung, Device)
        else:
            job._check_devices(rung, Device)
    assert {"pallas", "jax_example"} <= {rung.name for rung in rungs.RUNGS if rung.needs == "Hopper GPUs"}


@pytest.mark.parametrize("name", ["pallas", "jax_example"])
def test_kernels_are_built_as_they_are_called(name):
    # Inside a simulation kernels run on simulated devices; the ladder itself does not simulate them.
    problem = Problem(2, 128, 128, 256)
    mesh = devices.ring_mesh(jax.devices("cpu")[:2])
    operands = [devices.random_operands(problem, mesh, 0)]
    (rung,) = [rung for rung in rungs.RUNGS if rung.name == name]
    with interpret.simulate(seed=0) as sim, jax_example.pretend_machine(2, core_count=4):
        program = rung.build(problem, mesh, operands)
        out = sim.run(program.start, *program.operands[0])
    assert accuracy(out, *operands[0], mesh, "x").right
    assert ("tile_m=128" in program.details) == (name == "jax_example")
