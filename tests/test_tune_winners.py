"""How winners are kept, and found again only if they fit; broken files do no harm."""

import dataclasses
import json
import os

import jax
import pytest
from tuned_winners import CONFIG, PROBLEM, empty_cache, look_up, make_winner

from cmm import winners
from cmm.hopper import TuningConfig, tuned
from cmm.peers import jax_example
from cmm.tune.tunable import TUNABLES
from cmm.winners import config_fields


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and no shipped table."""
    return empty_cache(tmp_path, monkeypatch)


def test_round_trip(tmp_path):
    path = tmp_path / "new" / "table.json"
    written = winners.merge(
        [make_winner()], [make_winner(time_us=199.0), make_winner(kernel="fast"), make_winner(axis_size=2)]
    )
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
    winners.write([make_winner()], path)
    monkeypatch.setattr(winners.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        winners.write([make_winner(time_us=1.0)], path)
    assert winners.read(path) == [make_winner()] and list(tmp_path.iterdir()) == [path]


def test_cache(cache):
    assert look_up() is None
    assert tuned.remember([make_winner()]) == cache
    assert tuned.remember([make_winner(time_us=9.0, m_shard=512)]) == cache
    assert look_up() == CONFIG
    assert look_up(dataclasses.replace(PROBLEM, m_shard=512)) == CONFIG
    for other in ({"axis_size": 2}, {"m_shard": 2048}, {"k": 64}, {"n_shard": 4096}, {"dtype": "float16"}):
        assert look_up(dataclasses.replace(PROBLEM, **other)) is None
    assert look_up(kernel="fast") is None and look_up(device_kind="NVIDIA H100 80GB HBM3") is None


def test_the_shipped_table_comes_first_and_holds_for_many_processes_too(cache, tmp_path, monkeypatch):
    tuned.remember([make_winner(), make_winner(m_shard=512)])
    winners.write([make_winner(TuningConfig())], tmp_path / "shipped.json")
    half = dataclasses.replace(PROBLEM, m_shard=512)
    assert (look_up(), look_up(half)) == (TuningConfig(), CONFIG)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert (look_up(), look_up(half)) == (TuningConfig(), None)


FIELDS = config_fields(CONFIG)


@pytest.mark.parametrize(
    "winner",
    [
        make_winner(FIELDS | {"cluster_dimension": "M"}),  # a field that is no more
        make_winner(FIELDS | {"tile_m": 96}),
        make_winner(FIELDS | {"tile_k": 64.0}),
        make_winner(FIELDS | {"wg_dimension": "K"}),
        make_winner(FIELDS | {"max_concurrent_steps": 7}),  # too much shared memory
        make_winner({"tile_m": 64}),
        make_winner(right=False),
    ],
)
def test_configurations_of_another_version_are_ignored(cache, winner):
    winners.write([winner], cache)
    assert look_up() is None


def test_records_that_lack_something_are_left_out(cache):
    whole = dataclasses.asdict(make_winner())
    lacking = {name: value for name, value in whole.items() if name != "config"}
    records = [lacking, whole | {"m_shard": "many"}, whole | {"time_us": -1}, 7, whole | {"mood": "good"}]
    cache.parent.mkdir(parents=True)
    cache.write_text(json.dumps(records))
    assert winners.read(cache) == [make_winner()], "a key that nobody knows does no harm"


@pytest.mark.parametrize("content", [b"", b"{]", b'{"a": 1}', b"\xff\xfe", b"[" * 100_000])
def test_a_broken_cache_is_a_warning_and_can_be_replaced(cache, content):
    cache.parent.mkdir(parents=True)
    cache.write_bytes(content)
    with pytest.warns(UserWarning, match="Tuned configurations are left out"):
        assert look_up() is None
    with pytest.warns(UserWarning, match="left out"):
        tuned.remember([make_winner()])
    assert look_up() == CONFIG


def test_a_cache_that_cannot_be_read_or_written_is_a_warning(cache):
    cache.parent.parent.mkdir(parents=True)
    cache.parent.write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="left out"):
        assert look_up() is None
    with pytest.warns(UserWarning) as warned:
        assert tuned.remember([make_winner()]) is None
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
                assert look_up(winner.problem, winner.kernel, winner.device_kind) is not None


def test_best_config_of_the_example(monkeypatch, tmp_path):
    path = tmp_path / "best.json"
    monkeypatch.setattr(jax_example, "_BEST", path)
    assert jax_example.best_config(PROBLEM) == jax_example.PUBLISHED_CONFIG
    best = jax_example.search_space()[5]
    kind = jax.devices()[0].device_kind
    winners.write([make_winner(best, kernel="jax_example", device_kind=kind, right=False)], path)
    assert jax_example.best_config(PROBLEM) == best
    assert jax_example.is_searched(PROBLEM)
    other = dataclasses.replace(PROBLEM, k=64)
    assert jax_example.best_config(other) == jax_example.PUBLISHED_CONFIG and not jax_example.is_searched(other)
    narrow = jax_example.best_config(dataclasses.replace(other, m_shard=512, n_shard=192))
    assert narrow in jax_example.search_space() and (narrow.cta_tile_m, narrow.cta_tile_n) == (256, 64)
    with pytest.raises(ValueError, match="M=64, K=64 and N=.*: they have at least 128 rows and 64 columns"):
        jax_example.best_config(dataclasses.replace(other, m_shard=64))
