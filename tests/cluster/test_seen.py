"""What people see of a job from outside: DeepSpeed's monitors, ``recycle status``, the report, and the exit code of a
job that is to be started again.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from recycle_plugin.cli import main
from recycle_plugin.core.messages.from_coordinator import TRY_AGAIN
from recycle_plugin.lab.runs import await_reports
from tests.support.cluster import Result, Run
from tests.support.jobs import (
    CHECKPOINT,
    LOSS_TOLERANCE,
    SAMPLES,
    STEPS,
    WRAPPED,
    Shape,
    after_step,
    curve,
    faults,
    held,
)
from tests.support.wandb_files import runs

LOSS = "Train/Samples/train_loss"


def test_monitors_status_and_report_when_rank_0_dies(launch, tmp_path, capsys):
    monitor = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "csv"}}
    own = tmp_path / "own"
    wrap = json.dumps([{"name": "with_config"} | monitor, {"name": "own_monitor", "path": str(own)}])
    run = launch(faults("kill 0.0 before 0F0.1@8"), "recycle.report=true", script=WRAPPED, RECYCLE_TEST_WRAP=wrap)
    after_step(run, 12)
    assert main(["status", str(run.folder), "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    result = run.finish()
    assert result.code == 0 and {event["seat"] for event in result.of("lost")} == {"0.0"}, result.output[-6000:]

    assert {"Train/Samples/train_loss", "Train/Samples/lr", "Recycle/live_workers"} <= {*own.read_text().split()}
    losses = curve(tmp_path / "csv", "Train_Samples_train_loss")
    assert losses == pytest.approx(dict(enumerate(result.losses, 1)), abs=1e-6)
    assert set(curve(tmp_path / "csv", "Train_Samples_lr")) == set(range(1, STEPS + 1))
    live = curve(tmp_path / "csv", "Recycle_live_workers")
    assert all(workers == (4 if step < 8 else 3) for step, workers in live.items()) and {1, 6, 9, STEPS} <= set(live)
    for name in ("samples_per_second", "bubble_share", "redone_share", "membership_changes"):
        assert set(curve(tmp_path / "csv", f"Recycle_{name}")) >= set(live) - {1}, name
    assert curve(tmp_path / "csv", "Recycle_redone_share")[8] > 0
    assert curve(tmp_path / "csv", "Recycle_membership_changes")[STEPS] == 1

    assert status["workers"] == {"live": 3, "of": 4} and status["step"] >= 12
    assert " trained " in status["sentence"] and "0.0 in step 8" in status["sentence"]
    told = status["facts"]
    assert " layers (" in told["model"] and told["precision"] == "fp32"
    assert {"0.0", "0.1", "1.0", "1.1"} == {*told["hosts"].partition(": ")[2].split(", ")}
    ((gone,), predicted) = status["gone"], status["predicted_throughput"]
    assert gone["seat"] == "0.0" and "killed by signal 9 (SIGKILL), says its supervisor" in gone["why"]
    assert 0.4 < predicted < 0.7
    (told,) = result.of("report")
    await_reports(run.mark)
    assert told["text"] == f"{run.folder / 'report.html'} is being written"
    assert "(0.0 in step " in (run.folder / "report.html").read_text()


def test_tensorboard_reads_one_run_of_all_steps_when_rank_0_dies(launch, tmp_path):
    """Two workers have written to it, one after the other; TensorBoard's own reader makes one run of that."""
    reading = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed"
    )
    monitor = {"tensorboard": {"enabled": True, "output_path": str(tmp_path), "job_name": "board"}}
    wrap = json.dumps([{"name": "with_config"} | monitor])
    job = launch(faults("kill 0.0 before 0F0.1@8"), script=WRAPPED, RECYCLE_TEST_WRAP=wrap)
    result = job.finish()
    assert result.code == 0 and {event["seat"] for event in result.of("lost")} == {"0.0"}, result.output[-6000:]
    assert len([*(tmp_path / "board").iterdir()]) == 2
    board = reading.EventAccumulator(str(tmp_path / "board")).Reload()

    def read(name: str) -> dict[int, float]:
        return {each.step // SAMPLES: each.value for each in board.Scalars(name)}

    assert read(LOSS) == pytest.approx(dict(enumerate(result.losses, 1)), abs=1e-6)
    assert read("Train/Samples/lr").keys() == {*range(1, STEPS + 1)}
    live = read("Recycle/live_workers")
    assert live[6] == 4 and live[STEPS] == 3 and read("Recycle/membership_changes")[STEPS] == 1


def test_wandb_has_each_steps_loss_in_one_run_when_rank_0_dies(launch, tmp_path):
    """Offline, where each process that writes has a folder of its own, and a killed one's may lack its last 15 s."""
    pytest.importorskip("wandb", reason="wandb is not installed")
    wrap = json.dumps([{"name": "with_config", "wandb": {"enabled": True, "project": "recycle"}}])
    environment = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}
    job = launch(faults("kill 0.0 before 0F0.1@8"), script=WRAPPED, RECYCLE_TEST_WRAP=wrap, **environment)
    result = job.finish()
    assert result.code == 0 and {event["seat"] for event in result.of("lost")} == {"0.0"}, result.output[-6000:]
    assert not result.of("warning"), result.output[-6000:]
    ((name, rows),) = runs(tmp_path).items()
    assert name.startswith("recycle-"), "the job, whichever process writes"
    losses = {row["_step"] // SAMPLES: row[LOSS] for row in rows if LOSS in row}
    assert losses == pytest.approx(dict(enumerate(result.losses, 1)), abs=1e-6)


@pytest.mark.plain_too
def test_a_stage_that_all_leave_leaves_a_checkpoint_to_go_on_from(launch, reference, tmp_path):
    """As a scheduler would: exit code 75 means to start it again, with workers for every seat."""
    saved = str(tmp_path / "saved")
    run = launch(
        f"recycle.checkpoint_dir={saved}",
        faults("kill 1.1 before 1F1.0@5"),
        script=WRAPPED,
        RECYCLE_TEST_WRAP=json.dumps(held(tmp_path, 8, "go")),
    )
    result = ended_by_leaving(run, tmp_path, "0.1")
    (checkpoint,) = result.of("checkpoint")
    last = result.of("committed")[-1]["step"]
    assert checkpoint["path"] == f"{saved}/global_step{last}" and last < STEPS
    plan = json.dumps({"folder": saved, "load": True})
    again = launch(script=CHECKPOINT, RECYCLE_TEST_CHECKPOINT=plan).finish()
    assert again.code == 0 and again.losses == pytest.approx(reference().losses[last:], abs=LOSS_TOLERANCE), (
        again.output[-6000:]
    )


@pytest.mark.plain_too(deepspeed=False)
def test_a_death_while_that_checkpoint_is_saved(launch, tmp_path):
    """All steps are committed, and no step follows: the others save once more, where they would have waited for the
    lost one.
    """
    saved, deaths = tmp_path / "saved", ("kill 1.1 before 1F1.0@5", "kill 0.0 at checkpoint.written")
    run = launch(
        f"recycle.checkpoint_dir={saved}",
        faults(*deaths),
        shape=Shape(replicas=3),
        script=WRAPPED,
        RECYCLE_TEST_WRAP=json.dumps(held(tmp_path, 8, "go")),
    )
    result = ended_by_leaving(run, tmp_path, "0.1", "2.1")
    (checkpoint,), lost = result.of("checkpoint"), result.of("lost")
    last = result.of("committed")[-1]["step"]
    assert checkpoint["path"] == f"{saved}/global_step{last}"
    assert (saved / "latest").read_text() == f"global_step{last}"
    assert len(lost) == 2 and checkpoint["time"] > max(each["time"] for each in lost)


def ended_by_leaving(run: Run, gate: Path, *seats: str) -> Result:
    """The result of a job whose workers at ``seats``, the last ones of a stage, get SIGTERM before it goes on."""
    run.hear("lost")
    for seat in seats:
        os.kill(run.pid_of(seat), signal.SIGTERM)
    run.wait_for(lambda: len(run.of("leaving")) == len(seats), "word of all who leave")
    (gate / "go").touch()
    result = run.finish()
    assert result.code == TRY_AGAIN and "Traceback" not in result.output, result.output[-6000:]
    return result
