"""What becomes of a kernel, right or with a fault planted in it, under one seed of the simulator."""

import functools

import numpy as np

import cmm.interpret as ci


def verdict(kernel, case, seed, core_count, config) -> str:
    """Returns "race", "deadlock", "value" if the result is wrong, or "quiet"."""
    function = functools.partial(kernel, config=config)
    try:
        with ci.simulate(core_count=core_count, seed=seed, deadlock_timeout_s=5) as sim:
            out = sim.run(case.program(function), case.lhs, case.rhs)
    except ci.RaceError:
        return "race"
    except ci.DeadlockError:
        return "deadlock"
    reference = case.lhs64 @ case.rhs64
    return "quiet" if np.allclose(np.asarray(out, np.float64), reference, rtol=1e-2, atol=1e-1) else "value"
