"""What SWIFT's figures' scripts compute: the model's totals, and what real runs have left."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from recycle_plugin.planner.log_selection import Line


@pytest.fixture
def total_time(script):
    return script("swift_total_time", "real=[]")


@pytest.fixture
def method(total_time):
    return total_time.Method("plain", 1.0, 0.5, 0.1, 0.0, 10.0, 2.0)


def test_a_total_has_every_step_save_start_and_lost_step(method):
    """Failures before 4 and 8 of 10 steps; checkpoints after 3, 6 and 9: step 7 is lost, and nothing of the first."""
    found = method.total_from(10, 4, 3, 4)
    assert found == (pytest.approx(10 * 1.0 + 3 * 0.1 + 2 * (10 + 2) + 0.5), 20.0)


def test_a_checkpoint_counts_once_it_is_durable(method):
    """After step 3, and durable only two and a half steps later: the failure before step 5 goes back to the first."""
    slow = replace(method, persist_s=2.5)
    assert slow.total_from(6, 9, 3, 5).seconds - method.total_from(6, 9, 3, 5).seconds == pytest.approx(3 * 0.5)


def test_a_total_is_the_mean_over_the_places_of_the_first_failure(method):
    each = [method.total_from(12, 4, 5, first) for first in (1, 2, 3, 4)]
    found = method.total(12, 4, 5)
    assert found.seconds == pytest.approx(sum(one.seconds for one in each) / 4)
    assert found.start_up_s == pytest.approx(30.0), "three failures, wherever the first one is"


def test_the_best_interval_is_the_best_of_all(method):
    dear = replace(method, save_s=3.0)
    best = dear.best_interval(30, 10)
    totals = {every: dear.total(30, 10, every).seconds for every in range(1, 31)}
    assert totals[best] == min(totals.values()) and best > method.best_interval(30, 10)


def test_a_real_total_is_from_the_first_step_to_the_last_with_starts_told_apart(total_time, tmp_path):
    """Two workers; one is killed at 110, and both are ready again at 130."""
    told = {
        0: [("ready", 0, 99), ("step", 1, 105), ("ready", 0, 128), ("step", 2, 140)],
        1: [("ready", 0, 100), ("step", 1, 106), ("killed", 2, 110), ("ready", 0, 130), ("step", 2, 141)],
    }
    for rank, events in told.items():
        lines = [json.dumps({"event": event, "step": step, "time": at}) for event, step, at in events]
        (tmp_path / f"rank{rank}.jsonl").write_text("\n".join(lines) + "\n")
    assert total_time.total_of(tmp_path, 2) == (41, 20)


def test_kills_of_a_real_run_come_before_its_last_step(total_time):
    assert total_time.struck(SimpleNamespace(steps=60), 20) == [20, 40]


def test_the_exact_choice_is_never_slower_than_the_greedy_one(script):
    storage = script("swift_storage", "real.overheads=[]")
    config = storage.common.settings("swift_storage", ["real.overheads=[]"])
    for model in config.models:
        line = storage.line_of(model, config)
        assert isinstance(line, Line) and line.stages == config.machines
        for share in (0.0, 0.1, 0.35, 0.8, 1.0):
            best, greedy = storage.choices(line, share)
            assert best.fits and greedy.fits and best.expected_s <= greedy.expected_s


def test_a_restarting_job_goes_on_from_the_newest_step_that_all_have(script, tmp_path):
    job = script("restarting_job")
    assert job.newest(tmp_path, 2) == 0
    for step, ranks in ((3, (0, 1)), (6, (0, 1)), (9, (0,))):
        for rank in ranks:
            job.write({"step": step}, job.file_of(tmp_path, step, rank))
    assert job.newest(tmp_path, 2) == 6
