"""The search for the fastest configuration: what it tries, what wins, and how winners are kept and found again."""

import dataclasses
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cmm
from cmm import devices, suites, winners
from cmm.hopper import MatmulDimension, TuningConfig, tuned
from cmm.hopper.candidates import candidates
from cmm.peers import jax_example
from cmm.recording import GpuEvent
from cmm.roofline import Problem
from cmm.tune import __main__ as tune, search, tuning_record
from cmm.tune.halving import successive_halving
from cmm.tune.tunable import TUNABLES, Tunable
from cmm.winners import Winner, config_fields

H200 = "NVIDIA H200"
REAL_SEARCH = search.search
SHAPES = [(1024, 4096, 4096), (64, 4096, 4096), (2048, 7168, 8192), (4096, 26624, 16384), (128, 64, 64)]  # m, n, k


# --- What is tried ---


@pytest.mark.parametrize("m, n, k", SHAPES)
def test_candidates_fit_and_differ(m, n, k):
    found = candidates(m, n, k, "bfloat16", 132)
    assert found and len(set(found)) == len(found)
    for config in found:
        config.check(m, n, k, "bfloat16")
        assert config.tile_m * config.tile_n <= 128 * 128, "the accumulator does not fit into registers"
        # A snake wider than the grid is the same kernel as one of the grid's width: only one width may reach it.
        tiles = (m // config.cta_tile_m, n // config.cta_tile_n)[config.grid_minor_dim]
        wider = dataclasses.replace(config, grid_tile_width=16)
        assert config.grid_tile_width < tiles or config == wider or wider not in found


def test_candidates_are_few_where_order_makes_no_difference():
    one_row = candidates(64, 4096, 4096, "float16", 132)
    assert {config.wg_dimension for config in one_row} == {MatmulDimension.N}
    assert {(config.grid_minor_dim, config.grid_tile_width) for config in one_row} == {(MatmulDimension.M, 8)}


def test_the_most_promising_come_first():
    first = candidates(1024, 4096, 4096, "float16", 132)[:8]
    # Eight rows of 16 tiles of 128 x 256 are one round on 132 multiprocessors; smaller tiles load more.
    assert all(config.cta_tile_m * config.cta_tile_n == 128 * 256 for config in first)
    assert all(config.max_concurrent_steps == 4 for config in first[:5]), "four stages of 48 KB fit, five do not"
    # 2048 x 7168: 448 tiles of 128 x 128 are 4 rounds, 224 of 128 x 256 are 2 rounds of twice the work.
    assert {config.tile_n for config in candidates(2048, 7168, 8192, "float16", 132)[:60]} >= {128, 256}


def test_no_candidates_where_nothing_divides():
    assert candidates(16, 4096, 4096, "float16", 132) == []


def test_the_examples_own_settings():
    found = jax_example.search_space()
    assert len(found) == len(set(found)) == 48
    assert jax_example.PUBLISHED_CONFIG in found
    assert {(c.tile_m, c.tile_n, c.tile_k, c.max_concurrent_steps) for c in found} == {
        (m, n, 64, 4) for m in (128, 256) for n in (64, 128)
    }


@pytest.mark.parametrize(
    "name, axis_size, expected",
    [
        ("W1", 4, [(1024, 4096, 4096, "float16"), (1024, 4096, 4096, "bfloat16")]),
        ("llama3-8b", 8, [(512, 4096, 1792, "bfloat16"), (1024, 4096, 1792, "bfloat16")]),
        ("llama3-70b", 4, [(1024, 8192, 7168, "bfloat16"), (2048, 8192, 7168, "bfloat16")]),
        ("llama3-405b", 2, [(2048, 16384, 26624, "bfloat16"), (4096, 16384, 26624, "bfloat16")]),
        ("m-sweep", 2, [(2**i, 4096, 4096, "float16") for i in range(4, 14)]),
    ],
)
def test_suites(name, axis_size, expected):
    assert suites.suite(name, axis_size) == [Problem(axis_size, *shape) for shape in expected]
    assert {problem.dtype for problem in suites.suite(name, axis_size, "float16")} == {"float16"}


def test_suites_that_cannot_be():
    with pytest.raises(ValueError, match="no suite 'W2'. Known suites: W1, llama3-8b"):
        suites.suite("W2", 2)
    with pytest.raises(ValueError, match="28672 columns of the weights do not divide by 3 devices"):
        suites.suite("llama3-70b", 3)


# --- What wins ---


class FakeTimer:
    """Candidates are their true times; a short trial adds noise that depends on the candidate."""

    def __init__(self, noise=lambda candidate: 0, penalty=3):
        self.noise, self.penalty = noise, penalty
        self.compared = []

    def screen(self, batch):
        return [candidate + self.noise(candidate) for candidate in batch]

    def compare(self, best):
        self.compared.append(list(best))
        # Every round whoever is timed first gets a penalty: with a fixed order it would always hit the same one.
        return [candidate + (self.penalty if place == 0 else 0) for place, candidate in enumerate(best)]


def test_halving_keeps_a_quarter_and_decides_among_it():
    timer = FakeTimer(noise=lambda candidate: 5 if candidate == 1 else 0)  # The best looks like the sixth.
    batches = [list(range(40, 20, -1)), list(range(1, 21))]
    found = successive_halving(batches, timer.screen, timer.compare, lambda candidate: True, rounds=5)
    assert [trial.candidate for trial in found[:10]] == list(range(1, 11))
    assert [len(trial.rounds_us) for trial in found] == [5] * 11 + [0] * 29
    assert found[0].time_us == 1 and found[0].screened_us == 6, "one penalty in five rounds does not move the median"
    assert len({best[0] for best in timer.compared}) == 5
    assert found[10].candidate == 40, "what would be taken without a search is always compared"
    assert [trial.candidate for trial in found[11:]] == list(range(11, 40))


def test_a_wrong_candidate_cannot_win_and_only_fast_ones_are_checked():
    asked = []
    timer = FakeTimer()

    def approve(candidate):
        asked.append(candidate)
        return candidate != 1

    found = successive_halving([range(1, 21)], timer.screen, timer.compare, approve, rounds=3)
    assert asked == [1, 2, 3, 4, 5, 6], "a quarter of 20, and one more for the one that is wrong"
    assert [trial.candidate for trial in found[:5]] == [2, 3, 4, 5, 6]
    assert 1 in [trial.candidate for trial in found[5:]]
    none = successive_halving([range(1, 21)], timer.screen, timer.compare, lambda candidate: False, rounds=3)
    assert not any(trial.rounds_us for trial in none)


def test_stopping_keeps_what_was_found():
    timer = FakeTimer(penalty=0)
    left = iter([False, True, True])
    batches = ([10 * i + j for j in range(1, 9)] for i in range(10))
    found = successive_halving(batches, timer.screen, timer.compare, lambda c: True, 9, lambda: next(left))
    assert len(found) == 16, "the second batch is the last"
    assert found[0].candidate == 1 and [len(trial.rounds_us) for trial in found[:6]] == [1] * 5 + [0]


def test_kernel_times(monkeypatch):
    def events(*lengths_of_gpus):
        return [
            GpuEvent(gpu, "Stream", "body_mosaic_gpu_kernel", 100 * i, 100 * i + length)
            for gpu, lengths in enumerate(lengths_of_gpus)
            for i, length in enumerate(lengths)
        ] + [GpuEvent(0, "Stream", "Memset", 50, 90)]

    # Two programs, three calls each. GPU 1 is slower in the first program, GPU 0 in the second.
    recordings = iter([events((1, 2)), events((10, 11, 90, 40, 41, 42), (12, 13, 14, 20, 20, 20))])
    monkeypatch.setattr(search, "record", lambda run: next(recordings))
    assert search.kernel_times_us([None, None], [()] * 3, starts=1) == [13, 41], "the first recording lacks events"
    monkeypatch.setattr(search, "record", lambda run: events((1, 2)))
    with pytest.raises(RuntimeError, match=r"recorded \{0: 2\} matmul kernels by GPU, for 6 calls"):
        search.kernel_times_us([None, None], [()] * 3, starts=1)


@dataclasses.dataclass(frozen=True)
class Scale:
    """A configuration of a kernel that is right with 1.0 only."""

    factor: float
    time_us: float


def _scaled(lhs, rhs, axis_name, *, config):
    if config.factor == 0:
        raise ValueError("does not fit")
    return config.factor * cmm.all_gather_matmul_naive(lhs, rhs, axis_name)


def _search(configs, stop=lambda: False, **options):
    problem = Problem(2, 8, 16, 4, "float32")
    mesh = devices.ring_mesh(jax.devices("cpu")[:2])
    kernel = Tunable("scaled", _scaled, lambda problem, device: configs, **options)
    seen = []

    def timer(programs, operands, starts):
        # Which program is which shows in its result.
        lhs, rhs = (np.asarray(operand) for operand in operands[0])
        exact = np.sum(lhs @ rhs)
        factors = [np.sum(program(operands)[0]) / exact for program in programs]
        seen.append(starts)
        return [next(c.time_us for c in configs if abs(c.factor - factor) < 1e-3) for factor in factors]

    return problem, mesh, REAL_SEARCH(problem, kernel, mesh, configs, 3, stop=stop, timer=timer), seen


def test_search_leaves_out_what_is_wrong_or_does_not_fit():
    configs = [Scale(1.25, 1.0), Scale(0, 2.0), Scale(1.0, 3.0), Scale(1.5, 4.0)]
    problem, mesh, outcome, calls = _search(configs)
    assert [trial.candidate.config for trial in outcome.finalists] == [configs[2]]
    assert outcome.skipped == [(configs[1], "ValueError: does not fit")]
    assert (outcome.considered, outcome.stopped, len(outcome.trials)) == (4, False, 3)
    assert calls == [search.SCREENING_STARTS] + 3 * [search.FINAL_STARTS]
    found = json.loads(json.dumps(tuning_record.record("scaled", problem, mesh, 3, outcome)))
    assert [trial["right"] for trial in found["trials"]] == [True, False, False]
    winner = tuning_record.winner(found)
    assert (winner.config, winner.time_us, winner.runner_up_us) == ({"factor": 1.0, "time_us": 3.0}, 3.0, None)
    assert winner.problem == problem and winner.right and winner.command.endswith("--rounds 3 --candidates 4")
    assert tuning_record.file_name("scaled", problem, "cpu") == "tune_scaled_cpu_d2_m8_k16_n4_float32.json"
    repeat = ("scaled", problem, mesh, 3)
    assert tuning_record.is_repeat(found, *repeat, 4) and not tuning_record.is_repeat(found, *repeat, 5)
    assert not tuning_record.is_repeat(found | {"stopped": True}, *repeat, 4)


def test_a_peer_may_be_wrong_but_the_record_says_so():
    problem, mesh, outcome, _ = _search([Scale(1.25, 1.0), Scale(1.0, 3.0)], must_be_right=False)
    winner = tuning_record.winner(tuning_record.record("scaled", problem, mesh, 3, outcome))
    assert (winner.time_us, winner.runner_up_us, winner.right) == (1.0, 3.0, False) and winner.error_over_bound > 1


def test_search_that_is_out_of_time_still_tries_one():
    _, _, outcome, _ = _search([Scale(1.0, 2.0), Scale(1.25, 1.0)], stop=lambda: True)
    assert [trial.candidate.config for trial in outcome.finalists] == [Scale(1.0, 2.0)]
    assert outcome.stopped


# --- How winners are kept ---

CONFIG = TuningConfig(
    128, 128, max_concurrent_steps=3, wg_dimension=MatmulDimension.N, grid_minor_dim=MatmulDimension.N, epi_tile_n=None
)
PROBLEM = Problem(4, 1024, 4096, 2048, "bfloat16")


def _winner(config=CONFIG, problem=PROBLEM, time_us=200.0, **changes):
    fields = config if isinstance(config, dict) else config_fields(config)
    rest = {"runner_up_us": 201.5, "right": True, "error_over_bound": 0.3, "date": "2026-01-01", "machine": {}}
    winner = Winner("pallas", H200, **dataclasses.asdict(problem), config=fields, time_us=time_us, **rest,
                    versions={"jax": "0"}, command="x")  # fmt: skip
    return dataclasses.replace(winner, **changes)


def _look_up(problem=PROBLEM, kernel="pallas", device_kind=H200):
    p = problem
    return tuned.tuned_config(kernel, p.axis_size, p.m_shard, p.n_shard, p.k, jnp.dtype(p.dtype), device_kind)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and no shipped table."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tuned, "_shipped_table", lambda: tmp_path / "shipped.json")
    return tmp_path / "cache" / "cmm" / "tuned.json"


def test_round_trip(tmp_path):
    path = tmp_path / "new" / "table.json"
    written = winners.merge([_winner()], [_winner(time_us=199.0), _winner(kernel="fast"), _winner(axis_size=2)])
    winners.write(written, path)
    assert winners.read(path) == written and winners.read(str(path)) == written
    assert [(w.kernel, w.axis_size, w.time_us) for w in written] == [
        ("fast", 4, 200.0), ("pallas", 2, 200.0), ("pallas", 4, 199.0),
    ]  # fmt: skip
    assert [file.name for file in path.parent.iterdir()] == ["table.json"], "no temporary file is left"
    assert path.stat().st_mode & 0o044 == 0o044 & ~_umask(), "as readable as any file, for it is shipped"


def _umask():
    value = os.umask(0)
    os.umask(value)
    return value


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "table.json"
    winners.write([_winner()], path)
    monkeypatch.setattr(winners.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        winners.write([_winner(time_us=1.0)], path)
    assert winners.read(path) == [_winner()] and list(tmp_path.iterdir()) == [path]


def test_cache(cache):
    assert _look_up() is None
    assert tuned.remember([_winner()]) == cache
    assert tuned.remember([_winner(time_us=9.0, m_shard=512)]) == cache
    assert _look_up() == CONFIG
    assert _look_up(dataclasses.replace(PROBLEM, m_shard=512)) == CONFIG
    for other in ({"axis_size": 2}, {"m_shard": 2048}, {"k": 64}, {"n_shard": 4096}, {"dtype": "float16"}):
        assert _look_up(dataclasses.replace(PROBLEM, **other)) is None
    assert _look_up(kernel="fast") is None and _look_up(device_kind="NVIDIA H100 80GB HBM3") is None


def test_the_shipped_table_comes_first_and_holds_for_many_processes_too(cache, tmp_path, monkeypatch):
    tuned.remember([_winner(), _winner(m_shard=512)])
    winners.write([_winner(TuningConfig())], tmp_path / "shipped.json")
    half = dataclasses.replace(PROBLEM, m_shard=512)
    assert (_look_up(), _look_up(half)) == (TuningConfig(), CONFIG)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert (_look_up(), _look_up(half)) == (TuningConfig(), None)


FIELDS = config_fields(CONFIG)


@pytest.mark.parametrize(
    "winner",
    [
        _winner(FIELDS | {"cluster_dimension": "M"}),  # a field that is no more
        _winner(FIELDS | {"tile_m": 96}),
        _winner(FIELDS | {"tile_k": 64.0}),
        _winner(FIELDS | {"wg_dimension": "K"}),
        _winner(FIELDS | {"max_concurrent_steps": 7}),  # too much shared memory
        _winner({"tile_m": 64}),
        _winner(right=False),
    ],
)
def test_configurations_of_another_version_are_ignored(cache, winner):
    winners.write([winner], cache)
    assert _look_up() is None


def test_records_that_lack_something_are_left_out(cache):
    whole = dataclasses.asdict(_winner())
    lacking = {name: value for name, value in whole.items() if name != "config"}
    records = [lacking, whole | {"m_shard": "many"}, whole | {"time_us": -1}, 7, whole | {"mood": "good"}]
    cache.parent.mkdir(parents=True)
    cache.write_text(json.dumps(records))
    assert winners.read(cache) == [_winner()], "a key that nobody knows does no harm"


@pytest.mark.parametrize("content", [b"", b"{]", b'{"a": 1}', b"\xff\xfe", b"[" * 100_000])
def test_a_broken_cache_is_a_warning_and_can_be_replaced(cache, content):
    cache.parent.mkdir(parents=True)
    cache.write_bytes(content)
    with pytest.warns(UserWarning, match="Tuned configurations are left out"):
        assert _look_up() is None
    with pytest.warns(UserWarning, match="left out"):
        tuned.remember([_winner()])
    assert _look_up() == CONFIG


def test_a_cache_that_cannot_be_read_or_written_is_a_warning(cache):
    cache.parent.parent.mkdir(parents=True)
    cache.parent.write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="left out"):
        assert _look_up() is None
    with pytest.warns(UserWarning) as warned:
        assert tuned.remember([_winner()]) is None
    assert ["not kept" in str(warning.message) for warning in warned] == [False, True], "nor could it be read"


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert tuned.cache_path() == tmp_path / ".cache" / "cmm" / "tuned.json"


def test_shipped_files_hold_valid_winners_only():
    for path, kernels in (
        (tuned._shipped_table(), set(TUNABLES) - {"jax_example"}),
        (jax_example._BEST, {"jax_example"}),
    ):
        found = winners.read(path)
        assert len(found) == len(json.loads(path.read_text())) == len({winner.key for winner in found})
        for winner in found:
            assert winner.kernel in kernels
            if winner.kernel == "pallas":
                assert _look_up(winner.problem, winner.kernel, winner.device_kind) is not None


def test_best_config_of_the_example(monkeypatch, tmp_path):
    path = tmp_path / "best.json"
    monkeypatch.setattr(jax_example, "_BEST", path)
    assert jax_example.best_config(PROBLEM) == jax_example.PUBLISHED_CONFIG
    best = jax_example.search_space()[5]
    kind = jax.devices()[0].device_kind
    winners.write([_winner(best, kernel="jax_example", device_kind=kind, right=False)], path)
    assert jax_example.best_config(PROBLEM) == best
    assert jax_example.is_searched(PROBLEM)
    other = dataclasses.replace(PROBLEM, k=64)
    assert jax_example.best_config(other) == jax_example.PUBLISHED_CONFIG and not jax_example.is_searched(other)
    narrow = jax_example.best_config(dataclasses.replace(other, m_shard=512, n_shard=192))
    assert narrow in jax_example.search_space() and (narrow.cta_tile_m, narrow.cta_tile_n) == (256, 64)
    with pytest.raises(ValueError, match="M=64, K=64 and N=.*: they have at least 128 rows and 64 columns"):
        jax_example.best_config(dataclasses.replace(other, m_shard=64))


# --- The command ---


def _words(capsys):
    return " ".join(capsys.readouterr().out.split())


def test_help(capsys):
    with pytest.raises(SystemExit) as stop:
        tune.main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert all(word in text for word in (*TUNABLES, *suites.SUITES, "--limit-s", "--table", "examples:"))


def test_without_hopper_gpus_it_says_so(capsys, tmp_path, monkeypatch):
    cpu = jax.devices("cpu")
    monkeypatch.setattr(devices, "find_devices", lambda count: cpu[:count])
    assert tune.main(["--devices", "2", "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().out.strip() == (
        "Tuning needs Hopper GPUs, such as H100 or H200; found 2 x cpu. Times on other devices say nothing about them."
    )
    assert not (tmp_path / "out").exists()


def test_options_that_do_not_go_together(capsys):
    with pytest.raises(SystemExit) as stop:
        tune.main(["--suite", "W1", "--k", "64"])
    assert stop.value.code == 2 and "--suite has its own shapes" in capsys.readouterr().err


@pytest.fixture
def fake_gpus(monkeypatch, cache):
    """Two devices that pass for GPUs, and in the place of "pallas_fast" a kernel that takes made-up times."""
    configs = [Scale(1.25, 1.0), Scale(1.0, 3.0)]
    monkeypatch.setattr(tune, "_find_gpus", lambda count, kernel: jax.devices("cpu")[:2])
    kernel = Tunable("pallas_fast", _scaled, lambda problem, device: configs if problem.m_shard > 8 else [])
    monkeypatch.setitem(TUNABLES, "pallas_fast", kernel)
    monkeypatch.setattr(tune.search, "search", lambda problem, kernel, mesh, *rest: _search(configs)[2])


SMALL = ["--m-shard", "16", "--k", "16", "--n-shard", "4"]


def test_winners_go_to_the_cache_or_to_a_table(fake_gpus, cache, capsys, tmp_path):
    out, table = ["--out", str(tmp_path)], tmp_path / "table.json"
    assert tune.main([*SMALL, *out]) == 0
    (kept,) = winners.read(cache)
    assert (kept.config["factor"], kept.problem) == (1.0, Problem(2, 16, 16, 4))
    assert f"kept in {cache}" in _words(capsys).replace(" /", "/").replace("kept in", "kept in ")
    cache.unlink()
    assert tune.main([*SMALL, *out, "--table", str(table)]) == 0
    assert [winner.problem for winner in winners.read(table)] == [kept.problem] and not cache.exists()
    raw = json.loads((tmp_path / "tune_pallas_fast_cpu_d2_m16_k16_n4_float16.json").read_text())
    assert raw["problem"] == dataclasses.asdict(kept.problem) and len(raw["trials"]) == 2


def test_a_search_is_not_repeated(fake_gpus, cache, capsys, monkeypatch, tmp_path):
    arguments = [*SMALL, "--out", str(tmp_path)]
    # What the real search would be given; its stand-in returns two trials, too.
    monkeypatch.setattr(tune.tuning_record, "is_repeat", lambda found, *_: bool(found))
    assert tune.main(arguments) == 0
    cache.unlink()
    monkeypatch.setattr(tune.search, "search", None)
    assert tune.main(arguments) == 0 and "done before" in _words(capsys)
    assert len(winners.read(cache)) == 1, "its winner is kept all the same"
    (tmp_path / "tune_pallas_fast_cpu_d2_m16_k16_n4_float16.json").write_text("[broken")
    with pytest.raises(TypeError):
        tune.main(arguments)


def test_what_does_not_fit_is_left_out_and_a_broken_table_found_first(fake_gpus, capsys, tmp_path):
    assert tune.main(["--m-shard", "8", "--out", str(tmp_path)]) == 0
    assert "left out, no configuration has tiles that divide these sizes" in _words(capsys)
    (tmp_path / "table.json").write_text("{}")
    assert tune.main([*SMALL, "--out", str(tmp_path), "--table", str(tmp_path / "table.json")]) == 2
    assert "must be a list, got dict" in _words(capsys)


def test_no_winner_is_a_failure(monkeypatch, fake_gpus, capsys, tmp_path):
    for configs, reason in (([Scale(1.25, 1.0)], "none of 1 configurations gives"), ([Scale(0, 1.0)], "does not fit")):
        monkeypatch.setattr(tune.search, "search", lambda *_, configs=configs: _search(configs)[2])
        assert tune.main([*SMALL, "--out", str(tmp_path)]) == 1
        assert reason in _words(capsys)


def test_time_limit_between_problems(monkeypatch, fake_gpus, capsys, tmp_path):
    clock = iter([0.0] + [100.0] * 10)
    monkeypatch.setattr(tune.time, "monotonic", lambda: next(clock))
    assert tune.main(["--suite", "W1", "--limit-s", "50", "--out", str(tmp_path)]) == 1
    assert "time is up: 1 of 2 problems are left" in _words(capsys)


@pytest.mark.gpu
def test_on_gpus(gpus, cache, tmp_path):
    shape = ["--m-shard", "256", "--k", "1024", "--n-shard", "1024", "--out", str(tmp_path)]
    assert tune.main([*shape, "--candidates", "5", "--rounds", "2"]) == 0
    found = _look_up(Problem(len(gpus), 256, 1024, 1024), device_kind=gpus[0].device_kind)
    assert found in candidates(256, 1024, 1024, "float16", gpus[0].core_count)[:5]
