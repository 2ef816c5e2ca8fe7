"""The block of a simulation: its options do what they say, and JAX is afterwards as it was."""

import interpret_kernels as kernels
import jax
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

import cmm.interpret as ci
from cmm.interpret import _jax_private as jax_private


def test_record_keeps_races_and_values():
    f, x, want = kernels.push("missing_last_wait")
    with ci.simulate(on_race="record") as sim:
        np.testing.assert_array_equal(sim.run(f, x), want)
    assert sim.races and all(isinstance(r, ci.Race) for r in sim.races)
    with ci.simulate(detect_races=False) as sim:
        sim.run(f, x)
    assert not sim.races


def test_same_seed_same_events_and_other_seed_other_order():
    def events(seed):
        with ci.simulate(seed=seed) as sim:
            kernels.run_ring(sim, 4)
        return sim.events

    assert events(3) == events(3)
    assert events(None) == events(None)
    orders = {tuple((e.kind, e.device) for e in events(s)) for s in range(5)}
    assert len(orders) == 5


def test_numpy_seeds():
    with ci.simulate(seed=np.int64(3)) as sim:
        got, want = kernels.run_ring(sim, 2)
    np.testing.assert_array_equal(got, want)


def test_late_device_starts_last():
    with ci.simulate(late=ci.Late(1e-3, device=2)) as sim:
        kernels.run_ring(sim, 3)
    first = {}
    for e in sim.events:
        if e.kind == "load":
            first.setdefault(e.device, e.start_s)
    assert first[2] >= 1e-3 > max(first[0], first[1])


def test_ctas_per_device_limits_how_many_run_at_once():
    def body(x_ref, out_ref):
        rows = pl.ds(lax.axis_index("cta") * 16, 16)
        out_ref[rows] = x_ref[rows]

    f = jax.jit(lambda x: kernels.kernel_like(x, body, grid=(4,), grid_names=("cta",)))
    x = kernels.blocks(1)
    most = {}
    for limit in (1, 2, None):
        with ci.simulate(ctas_per_device=limit) as sim:
            np.testing.assert_array_equal(sim.run(f, x), x)
        spans = [(e.start_s, e.end_s) for e in sim.events if e.kind == "kernel"]
        assert len(spans) == 4
        most[limit] = max(sum(s <= t < e for s, e in spans) for t, _ in spans)
    assert most == {1: 1, 2: 2, None: 4}


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(on_race="explode"), ValueError, "on_race"),
        (dict(ctas_per_device=0), ValueError, "ctas_per_device"),
        (dict(core_count=0), ValueError, "core_count"),
        (dict(deadlock_timeout_s=0), ValueError, "deadlock_timeout_s"),
        (dict(late=ci.Late(-1.0)), ValueError, "late by 0 seconds"),
        (dict(seed="a"), TypeError, "'str'"),
        (dict(seed=1.5), TypeError, "'float'"),
    ],
)
def test_options_without_meaning_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        with ci.simulate(**options):
            pass


def test_is_active_inside_the_block_only():
    assert not ci.is_active()
    with ci.simulate():
        assert ci.is_active()
    assert not ci.is_active()


def test_jax_is_left_as_it_was():
    from jax._src import config
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as hook

    theirs = hook.interpret_pallas_call
    setting = config.pallas_tpu_interpret_mode_context_manager
    for fail in (False, True):
        try:
            with ci.simulate():
                assert hook.interpret_pallas_call is not theirs
                if fail:
                    raise KeyError
        except KeyError:
            pass
        assert hook.interpret_pallas_call is theirs
        assert setting.value is None


def test_outside_the_block_a_traced_function_says_what_is_wrong():
    f, x, want = kernels.push()
    with ci.simulate() as sim:
        np.testing.assert_array_equal(sim.run(f, x), want)
    with pytest.raises(ValueError, match="Only interpret mode is supported"):
        f(x)
    with ci.simulate() as sim:
        np.testing.assert_array_equal(sim.run(f, x), want)


def test_missing_private_name_is_reported(monkeypatch):
    monkeypatch.setitem(jax_private._NEEDED, "jax._src.core", ("no_such_name",))
    jax_private.check.cache_clear()
    try:
        with pytest.raises(ci.UnsupportedJaxError, match="0.11.2 and 0.12.0.1.*lacks.*no_such_name"):
            with ci.simulate():
                pass
    finally:
        monkeypatch.undo()
        jax_private.check.cache_clear()
        jax_private.check()
