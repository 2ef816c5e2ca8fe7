"""What is asked for is what runs: options of the command, the plan of a child, its rungs and protocol."""

import dataclasses

import pytest

from cmm import rungs
from cmm.bench import __main__ as bench, child as bench_child
from cmm.bench.child import Plan
from cmm.bench.options import command_of, parse, plan_of
from cmm.protocol import ON_GPUS, on_gpus
from cmm.roofline import Problem


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--suite", "W1,magic"], "unknown: magic; known: W1, llama3-8b"),
        (["--methods", "gemm"], "unknown: gemm; known: gemm_only_torch"),
        (["--suite", "W1", "--k", "8"], "--suite has its own shapes"),
        (["--quick", "--processes", "2"], "--quick is one process"),
        (["--limit-s", "0"], "must be at least 1"),
        (["--peers", "magic"], "unknown: magic; known: xla_rewrite, torch_symm_mem"),
        (["--peers-only"], "--peers-only needs --devices"),
        (["--peers-only", "--devices", "2", "--methods", "ring"], "leave out --methods"),
    ],
)
def test_bad_options(capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        bench.main(arguments)
    assert stop.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, processes, rounds",
    [([], 3, 8), (["--quick"], 1, 5), (["--quick", "--rounds", "7"], 1, 7), (["--simulate"], 2, 5)],
)
def test_processes_and_rounds(arguments, processes, rounds):
    options = parse(arguments)
    assert (options.processes, options.rounds) == (processes, rounds)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--suite", "W1,m-sweep", "--quick"],
        ["--k", "8", "--methods", "ring", "--peers", "--rounds", "3"],
        ["--peers", "torch_symm_mem", "--simulate"],
        ["--peers-only", "--peers", "torch_symm_mem", "--rounds", "3", "--dtype", "float16"],
        ["--peers-only", "--quick"],
    ],
)
def test_the_recorded_command_repeats_the_run(arguments):
    options = parse([*arguments, "--devices", "2"])
    command = command_of(options, plan_of(options, "", None), 2).split()
    again = parse(command[3:])
    methods = None if options.peers_only else options.methods or rungs.CHOICES
    assert plan_of(again, "", None) == dataclasses.replace(plan_of(options, "", None), methods=methods)
    assert again.peers_only == options.peers_only
    assert (again.processes, again.quick, again.peers) == (options.processes, options.quick, options.peers)


def test_only_asked_rungs_run_and_none_of_them_ends_all():
    by_name = {rung.name: rung for rung in bench_child.rungs_for(("ring", "pallas"))}
    assert list(by_name) == [rung.name for rung in rungs.RUNGS]
    assert by_name["gemm_only"] is rungs.GEMM_ONLY
    assert by_name["pallas"].needs == "Hopper GPUs" and by_name["pallas"].peer and by_name["ring"].peer
    # The faster roof decides on ratios, so that both run whatever was asked for.
    assert by_name["gemm_only_torch"].build is next(r.build for r in rungs.RUNGS if r.name == "gemm_only_torch")
    with pytest.raises(NotImplementedError, match="^not asked for$"):
        by_name["jax_example"].build(None, None, None)


def test_problems_of_a_plan():
    assert Plan("", shape=(1, 2, 3), dtype="float32").problems(4) == [Problem(4, 1, 2, 3, "float32")]
    both = Plan("", ("W1", "m-sweep"), dtype="float16").problems(2)
    assert len(both) == 10 and both[0].m_shard == 1024, "a problem that two suites share is measured once"
    assert max(p.k for p in Plan("", ("llama3-405b",), simulate=True).problems(2)) == 256


def test_long_calls_are_timed_in_shorter_chains():
    published = on_gpus(Problem(2, 1024, 4096, 4096))
    assert published == ON_GPUS
    long = on_gpus(Problem(2, 4096, 16384, 26624, "bfloat16"))
    assert (long.rounds, long.operand_sets) == (ON_GPUS.rounds, ON_GPUS.operand_sets) and ON_GPUS.operand_sets >= 8
    assert 1 <= long.short_chain < long.long_chain < 10 and 1 <= long.short_starts < long.long_starts < 4
    assert long.recorded_starts == 1 and "1 recorded start but" in long.in_words(("ring",))
    # The same shape takes far longer in float32, which tensor cores do not multiply.
    assert on_gpus(Problem(2, 1024, 4096, 4096, "float32")).long_chain < published.long_chain / 5
