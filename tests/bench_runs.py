"""Made-up records of single processes of the benchmark, for tests of what is made of them."""

from cmm.protocol import ON_GPUS
from cmm.results import MethodResult, Rounds, Run, Spread
from cmm.roofline import Problem

PROBLEM = Problem(2, 128, 256, 512, "float16")
ONE = Spread(1.0, 1.0, 1.0)


def make_method(name, status="measured", reason="", error=0.1):
    """Returns what a process found for one method; all its times and ratios are 1."""
    if status != "measured":
        return MethodResult(name, name, status, reason)
    return MethodResult(name, name, status, reason, error, 1e-4, ONE, ONE, ONE, ONE, ONE)


def make_run(times, problem=PROBLEM, skipped=None, errors=None, **changes):
    """Returns a record of one process. `times`: call and kernel times by method and round; the wall has 1 more."""
    rounds = {name: [Rounds(call, kernel, [t + 1.0 for t in call])] for name, (call, kernel) in times.items()}
    methods = [make_method(name, error=(errors or {}).get(name, 0.1)) for name in times]
    methods += [make_method(name, "skipped", reason) for name, reason in (skipped or {}).items()]
    fields = {
        "problem": problem,
        "machine": {"device_kind": "NVIDIA H200"},
        "versions": {"jax": "0.11.2"},
        "simulated": False,
        "distribution": "normal(0, 1)",
        "protocol": ON_GPUS.in_words(tuple(times)),
        "date": "2026-01-02",
        "command": "child",
        "methods": tuple(methods),
        "rounds": rounds,
    }
    return Run(**(fields | changes))
