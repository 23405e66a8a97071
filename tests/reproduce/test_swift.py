"""What SWIFT's figures' scripts compute: the model's totals, and what real runs have left."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from recycle_plugin.planner.log_selection import Line


@pytest.fixture
def model(script):
    return script("swift_model")


@pytest.fixture
def method(model):
    return model.Method("plain", 1.0, 0.5, 0.1, 0.0, 3.0, 7.0, 2.0)


@pytest.fixture
def jobs(script):
    return script("swift_jobs")


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


def test_a_recovery_of_the_model_has_its_parts(method):
    found = method.recovery(4)
    assert found == (3.0, 7.0, 2.0, 2.0, 1.0, 4) and found.total_s == pytest.approx(15.0)


def test_the_configured_methods_differ_in_what_they_should(script, model):
    config = script("swift_total_time").common.settings("swift_total_time", [])
    found = {each.name: each for each in model.methods(config.constants)}
    assert found[model.RESTART].persist_s == 0 and found[model.CHECKFREQ].save_s < found[model.RESTART].save_s
    assert found[model.REPLAY].redo_s < found[model.REPLAY_ALONE].redo_s < found[model.RESTART].redo_s
    assert len(config.failures_every) == 3


TOLD = {
    "rank0": [("ready", 0, 99), ("loaded", 0, 99), *(("step", step, 100 + step) for step in range(1, 6))],
    "rank1": [("ready", 0, 100), ("loaded", 0, 100), *(("step", step, 100.5 + step) for step in range(1, 6))],
}
"""Of a peer's job; rank 1 is killed at 110 before step 6, noticed at 112; both are ready again at 130, have the state
of step 3 at 131, and step 5 at 134.5."""


@pytest.fixture
def told(jobs, monkeypatch, tmp_path):
    monkeypatch.setattr(jobs, "WORKERS", 2)
    again = [(4, 133), (5, 134), (6, 135)]
    tells = {
        "rank0": [*TOLD["rank0"], ("ready", 0, 128), ("loaded", 3, 131), *(("step", *each) for each in again)],
        "rank1": [
            *TOLD["rank1"],
            ("killed", 6, 110),
            ("ready", 0, 130),
            ("loaded", 3, 130.5),
            *(("step", step, at + 0.5) for step, at in again),
        ],
        "starter": [("seen", 0, 112)],
    }
    for who, events in tells.items():
        lines = [
            json.dumps({"who": who, "event": event, "step": step, "time": at, "loss": at / 100})
            for event, step, at in events
        ]
        (tmp_path / f"{who}.jsonl").write_text("\n".join(lines) + "\n")
    return jobs.Told.read(tmp_path)


def test_a_real_total_is_from_the_first_step_to_the_last_with_starts_told_apart(script, told):
    assert script("swift_total_time").total_of(told, 6) == (35.5, 20)


def test_parts_of_a_recovery_end_where_the_last_rank_has_come_to_them(told):
    found = told.recovery()
    assert found == pytest.approx((2, 18, 1, 3.5, 1, 2)) and found.total_s == pytest.approx(25.5)


def test_a_step_that_was_trained_again_has_its_last_loss(told):
    assert told.losses[5] == pytest.approx(1.345) and told.losses[3] == pytest.approx(1.035) and len(told.losses) == 6


def test_seconds_between_events_are_of_one_rank_and_step(jobs):
    events = [
        ("rank0", "step", 1, 1.0),
        ("rank1", "step", 1, 2.0),
        ("rank0", "saved", 1, 1.5),
        ("rank1", "saved", 1, 2.1),
    ]
    told = jobs.Told(tuple(dict(zip(("who", "event", "step", "time"), each)) for each in events))
    assert told.seconds("saved", "step") == pytest.approx(0.3) and told.seconds("durable", "saved") is None


def test_losses_that_are_missing_differ(script):
    recovery = script("swift_recovery")
    assert recovery.difference({1: 1.0, 2: 2.0}, {1: 1.5, 2: 2.1}, 2) == pytest.approx(0.5)
    assert math.isnan(recovery.difference({1: 1.0}, {1: 1.0, 2: 2.0}, 2))


def test_a_method_that_is_none_is_named(script, tmp_path):
    with pytest.raises(SystemExit, match="backups is no method; there is replay with helpers, "):
        script("swift_recovery").main([f"run_dir={tmp_path}", "real=[{topology: pp4_dp1, methods: [backups]}]"])


def test_throughput_is_beside_the_same_engines_job_in_the_same_window(script, capsys):
    """The machine is half as fast in each second window; a checkpoint costs a tenth."""
    free = script("swift_failure_free")
    names, windows, steps = list(free.BESIDE), {}, {}
    for place, name in enumerate(names):
        began = [100.0 * place, 100.0 * place + 1000]
        windows[name] = [free.Window(at, at + 40, 0.0) for at in began]
        step_s = 2.0 if name == free.RESTART else 1.8
        ends = {
            1000 * slow + number: at + number * step_s * (1 + slow)
            for slow, at in enumerate(began)
            for number in range(1, 10)
        }
        steps[name] = free.Steps(ends, dict.fromkeys(ends, 0.5))
    table = free.Table("", [free.Column(name) for name in "abcdefghij"])
    free.judged(table, windows, steps)
    assert {row[0]: row[5] for row in table.rows} == {
        name: pytest.approx(0.9 if name == free.RESTART else 1.0) for name in names
    }
    steps[free.LOG].losses[1] = 0.6
    with pytest.raises(free.RunFailed, match="log, ours: the losses are 1.0e-01 apart"):
        free.judged(table, windows, steps)


def test_kills_of_a_real_run_come_before_its_last_step(script):
    assert script("swift_total_time").struck(SimpleNamespace(steps=60), 20) == [20, 40]


def test_the_exact_choice_is_never_slower_than_the_greedy_one(script):
    storage = script("swift_storage", "real.overheads=[]")
    config = storage.common.settings("swift_storage", ["real.overheads=[]"])
    for model in config.models:
        line = storage.line_of(model, config)
        assert isinstance(line, Line) and line.stages == config.machines
        for share in (0.0, 0.1, 0.35, 0.8, 1.0):
            best, greedy = storage.choices(line, share)
            assert best.fits and greedy.fits and best.expected_s <= greedy.expected_s


def test_a_restarting_job_goes_on_from_the_newest_step_that_all_have(script, tmp_path, monkeypatch):
    job = script("restarting_job")
    assert job.newest(tmp_path, 2) == 0
    for step, ranks in ((3, (0, 1)), (6, (0, 1)), (9, (0,))):
        for rank in ranks:
            monkeypatch.setattr(job, "RANK", rank)
            job.write({"step": step}, tmp_path, step)
    assert job.newest(tmp_path, 2) == 6


def test_an_elastic_job_without_replicas_is_refused(script, monkeypatch):
    """Its line says why, and what else there is."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    job = script("elastic_job", "model=emulated", "topology=pp4_dp1")
    with pytest.raises(SystemExit) as refused:
        job.main()
    said = refused.value.code
    assert "topology.replicas=1" in said and "die with its worker" in said and "\n" not in said


SMALL = [
    "model=emulated",
    "optimizer=adam",
    "model.width=64",
    *(f"model.{op}_ms=2" for op in ("forward", "input", "weight")),
]


@pytest.mark.processes
@pytest.mark.timeout(400)
def test_an_elastic_job_redoes_what_it_had_not_committed_and_loses_nothing(jobs, tmp_path):
    """A worker is killed in each of two rounds; losses are those of a run without."""
    overrides = [*SMALL, "topology=pp2_dp2", "steps=12", "report_every=0"]
    alone = jobs.elastic(tmp_path / "alone", overrides, 3)
    told = jobs.elastic(tmp_path / "killed", overrides, 3, [6, 9], lost=3)
    assert [each["step"] for each in told.of("killed")] == [6, 9] and len(told.of("seen")) == 2
    assert [each["step"] for each in told.of("loaded")] == [0] * 4 + [3] * 4 + [6] * 4
    assert told.losses == alone.losses and len(alone.losses) == 12
    assert told.recovery().steps == 2 and min(told.recovery()[:5]) >= 0


@pytest.mark.processes
@pytest.mark.timeout(400)
def test_a_restarting_job_trains_the_same_steps_again(jobs, tmp_path):
    """On the data that they had; CheckFreq-style, since its thread writes while the next step is trained."""
    overrides = [*SMALL, "topology=pp4_dp1", "steps=9", "report_every=0"]
    told = jobs.restarting(tmp_path / "killed", overrides, 3, True, [6])
    alone = jobs.restarting(tmp_path / "alone", overrides, 0, False)
    assert told.losses == alone.losses and len(alone.losses) == 9
    assert told.recovery().steps == 2 and not alone.of("saved") and told.of("durable")
