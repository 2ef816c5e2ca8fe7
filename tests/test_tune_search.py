"""What wins a search: the fastest of those that are right, though short trials are noisy."""

import json

import pytest
from scaled_kernel import Scale, search_scaled

from cmm.recording import GpuEvent
from cmm.tune import search, tuning_record
from cmm.tune.halving import successive_halving


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


def test_search_leaves_out_what_is_wrong_or_does_not_fit():
    configs = [Scale(1.25, 1.0), Scale(0, 2.0), Scale(1.0, 3.0), Scale(1.5, 4.0)]
    problem, mesh, outcome, calls = search_scaled(configs)
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
    problem, mesh, outcome, _ = search_scaled([Scale(1.25, 1.0), Scale(1.0, 3.0)], must_be_right=False)
    winner = tuning_record.winner(tuning_record.record("scaled", problem, mesh, 3, outcome))
    assert (winner.time_us, winner.runner_up_us, winner.right) == (1.0, 3.0, False) and winner.error_over_bound > 1


def test_search_that_is_out_of_time_still_tries_one():
    _, _, outcome, _ = search_scaled([Scale(1.0, 2.0), Scale(1.25, 1.0)], stop=lambda: True)
    assert [trial.candidate.config for trial in outcome.finalists] == [Scale(1.0, 2.0)]
    assert outcome.stopped
