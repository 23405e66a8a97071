"""Checkpoints are there whole or not at all, whoever dies while they are saved or loaded."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from recycle_plugin.runs import processes_with
from tests.support.jobs import LOSS_TOLERANCE, Shape, assert_one_line, faults

SCRIPT = "tests/jobs/checkpoint.py"
SAVES = [3, 6, 9]
STEPS = 12
FILES = 3  # of a stage: two layers, and the optimizer's state


@pytest.fixture
def start(launch, tmp_path):
    """``start(*overrides, shape=, **plan)``: a run of tests/jobs/checkpoint.py that saves to tmp_path/saved."""

    def run(*overrides: str, shape: Shape = Shape(), **plan: object):
        plan = {"folder": str(tmp_path / "saved"), "flags": str(tmp_path / "flags")} | plan
        return launch(f"steps={STEPS}", *overrides, shape=shape, script=SCRIPT, RECYCLE_TEST_CHECKPOINT=json.dumps(plan))

    return run


@pytest.fixture(scope="module")
def undisturbed(server, tmp_path_factory):
    """(losses, folder) of a job that saves after each of SAVES and loses nobody."""
    from tests.cluster.conftest import launching

    folder = tmp_path_factory.mktemp("undisturbed")
    plan = {"folder": str(folder / "saved"), "save_at": SAVES}
    with launching(server, folder) as launch:
        result = launch(f"steps={STEPS}", script=SCRIPT, RECYCLE_TEST_CHECKPOINT=json.dumps(plan)).finish()
    assert result.code == 0, result.output[-6000:]
    return result.losses, folder / "saved"


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def assert_whole(folder: Path, like: Path, step: int) -> None:
    """``folder`` names the checkpoint of ``step`` as the latest, has each one up to that whole, as undisturbed jobs write it, and nothing else."""
    assert (folder / "latest").read_text() == f"global_step{step}"
    saved = {name for name in files(like) if name == "latest" or int(name.split("/")[0].removeprefix("global_step")) <= step}
    assert files(folder) == saved
    for name in saved - {"latest"}:
        mine, theirs = (torch.load(place / name, weights_only=False) for place in (folder, like))
        assert_alike(mine, theirs, name)


def assert_alike(mine: object, theirs: object, name: str) -> None:
    assert type(mine) is type(theirs), name
    if isinstance(mine, dict):
        assert mine.keys() == theirs.keys(), name
        for key in mine.keys() - {"ds_config"}:  # the run's folder is in it
            assert_alike(mine[key], theirs[key], f"{name}: {key}")
    elif isinstance(mine, (list, tuple)):
        assert len(mine) == len(theirs), name
        for one, other in zip(mine, theirs):
            assert_alike(one, other, name)
    elif torch.is_tensor(mine):
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-6), name
    else:
        assert mine == pytest.approx(theirs) if isinstance(mine, float) else mine == theirs, name


DEATHS = [
    ("0.0 at checkpoint.start:2", "1.1 at checkpoint.start:4"),
    (f"0.0 at checkpoint.file:{FILES + 1}", f"0.1 at checkpoint.file:{2 * FILES + 2}"),
    ("0.0 at checkpoint.written:2", f"0.1 at checkpoint.file:{3 * FILES}"),
    ("0.0 at checkpoint.publish:2", "1.1 at checkpoint.written:3"),
    ("0.0 at checkpoint.named:2", f"0.1 at checkpoint.file:{3 * FILES + 1}"),
    ("0.0 at checkpoint.latest:2", "0.1 at checkpoint.written:4"),
]


@pytest.mark.parametrize(
    "deaths", [pytest.param(deaths, id=deaths[0].split(".")[-1], marks=[pytest.mark.all_kills] * (number % 4 > 0)) for number, deaths in enumerate(DEATHS)]
)
def test_a_death_while_saving(start, undisturbed, tmp_path, deaths):
    """One in the second save, and one in its repetition or in the third one; all three end up whole."""
    losses, like = undisturbed
    result = start(faults(*(f"kill {death}" for death in deaths)), save_at=SAVES).finish()
    assert result.code == 0, result.output[-6000:]
    assert len(result.of("lost")) == 2 == len(result.of("fault")), result.output[-6000:]
    assert result.losses == pytest.approx(losses, abs=LOSS_TOLERANCE)
    assert_whole(tmp_path / "saved", like, SAVES[-1])


@pytest.mark.parametrize("point", (pytest.param("file", marks=pytest.mark.all_kills), "publish"))
def test_everybody_dies_while_saving(start, undisturbed, tmp_path, point):
    """The one before stays whole, and the one that is named."""
    seats = ("0.0", "0.1", "1.0", "1.1")
    deaths = [f"kill {seat} at checkpoint.{'written' if seat[0] == '1' else f'file:{FILES + 2}'}{':2' * (seat[0] == '1')}" for seat in seats]
    if point == "publish":
        deaths = ["kill 0.0 at checkpoint.publish:2", "kill 1.0 at checkpoint.publish:1"]
    result = start(faults(*deaths), save_at=SAVES).finish()
    assert_one_line(result, "Last checkpoint: ")
    saved = tmp_path / "saved"
    assert not (saved / "global_step6").exists()
    for left in saved.glob("*.incomplete-*"):
        for path in left.iterdir():
            path.unlink()
        left.rmdir()
    assert_whole(saved, undisturbed[1], SAVES[0])


@pytest.mark.all_kills
def test_sigterm_to_everything_while_saving(start, undisturbed, tmp_path):
    """The checkpoint is finished, and the job ends at a commit."""
    run = start("steps=1000", save_at=SAVES[:2], hold=True)
    saved = tmp_path / "saved"
    run.wait_for(lambda: list(saved.glob("global_step6.incomplete-*")), "the second save")
    supervisors = [process.pid for process in processes_with(run.mark) if process.pid != run.launcher.pid]
    for pid in [*supervisors, *run.pids().values()]:
        os.kill(pid, signal.SIGTERM)
    (tmp_path / "flags").mkdir()
    (tmp_path / "flags" / "go").touch()
    result = run.finish()
    assert result.code == 0 and not result.of("lost") and result.of("finished"), result.output[-6000:]
    assert_whole(saved, undisturbed[1], 6)


def test_load_while_training(start, undisturbed):
    """Back to the third step after the seventh, where the same numbers come once more; the second load loses somebody."""
    losses, _ = undisturbed
    expected = losses[:7] + losses[3:]
    result = start(save_at=[3], load_at=7, load_step=3).finish()
    assert result.code == 0, result.output[-6000:]
    assert result.losses == pytest.approx(expected, abs=LOSS_TOLERANCE)
    result = start(faults("kill 1.0 at load.start", "kill 0.1 at load.end"), save_at=[3], load_at=7, load_step=3).finish()
    assert result.code == 0 and len(result.of("lost")) == 2, result.output[-6000:]
    assert result.losses == pytest.approx(expected, abs=LOSS_TOLERANCE)


def test_other_numbers_of_replicas_and_stages(start, undisturbed):
    """Any number of replicas goes on; with another number of stages weights alone are read."""
    losses, like = undisturbed
    result = start("steps=11", shape=Shape(replicas=3), folder=str(like), load=True).finish()
    assert result.code == 0 and all(len(record["losses"]) == 2 for record in result.records.values()), result.output[-6000:]
    pair = Shape(replicas=2, stages=1)
    assert_one_line(start(shape=pair, folder=str(like), load=True).finish(), "is of 2 pipeline stages, and this job has 1")
    result = start("steps=1", shape=pair, folder=str(like), load=True, module_only=True).finish()
    assert result.code == 0 and result.losses[0] < losses[0] - 0.1, result.output[-6000:]


def test_checkpoints_by_themselves(start, undisturbed, tmp_path):
    """Written while training goes on: the first whole, the second dropped since one of its writers dies, and made up for."""
    folder = tmp_path / "own"
    result = start("steps=40", "recycle.checkpoint={overhead: 0.9, keep: 1}", f"recycle.checkpoint_dir={folder}", faults(f"kill 0.0 at checkpoint.file:{FILES + 1}")).finish()
    assert result.code == 0 and len(result.of("lost")) == 1, result.output[-6000:]
    assert result.losses[:STEPS] == pytest.approx(undisturbed[0], abs=LOSS_TOLERANCE)
    made = result.of("checkpoint")
    (lost,) = result.of("lost")
    assert sum(event["time"] < lost["time"] for event in made) == 1 and len(made) >= 2, result.output[-6000:]
    assert all(event["every"] >= event["cost_s"] / event["step_s"] / 0.9 - 1 for event in made[:1])
    assert {path.name for path in folder.glob("automatic_step*") if ".incomplete-" not in path.name} == {Path(made[-1]["path"]).name}
    step = int((folder / "latest").read_text().removeprefix("automatic_step"))
    assert made[-1]["path"] == str(folder / f"automatic_step{step}") and step > 11
    resumed = start(f"steps={step + 3}", folder=str(folder), load=True).finish()
    whole = start(f"steps={step + 3}").finish()
    assert resumed.code == whole.code == 0, resumed.output[-6000:]
    assert resumed.losses == pytest.approx(whole.losses[step:], abs=LOSS_TOLERANCE)


@pytest.mark.all_kills
def test_steps_that_are_rejected_drop_no_checkpoint(start, tmp_path):
    """Each makes another membership of the same members."""
    result = start("steps=30", "gradient_clipping=0.05", "recycle.clip=validate", "recycle.checkpoint={overhead: 0.9}", f"recycle.checkpoint_dir={tmp_path}/own").finish()
    assert result.code == 0 and len(result.of("rejected")) >= 25, result.output[-6000:]
    assert len(result.of("checkpoint")) >= 2, result.output[-6000:]


# --- what is in no file of stock's, and what is read wrongly --------------------------------------------

SCALED = (
    "gradient_clipping=1.25", "recycle.clip=validate", "recycle.nonfinite=skip", "recycle.loss_scaling=true",
    "deepspeed={fp16: {enabled: false, initial_scale_power: 8, loss_scale_window: 4, hysteresis: 1}}",
)  # fmt: skip


def scales(result, after: int = 0) -> dict[int, float]:
    """By the step after which it is another one."""
    return {event["step"]: event["scale"] for event in result.of("loss_scale") if event["step"] > after}


def test_the_loss_scale_goes_on_from_a_checkpoint(start, undisturbed, tmp_path):
    """It is in a file of its own; without that, as from stock DeepSpeed, it is as at a job's start, and that is said."""
    whole = start(*SCALED, save_at=[6]).finish()
    saved = tmp_path / "saved" / "global_step6"
    resumed = start(*SCALED, load=True).finish()
    assert whole.code == resumed.code == 0, resumed.output[-6000:]
    assert scales(resumed) == scales(whole, after=6) and len(scales(whole, after=6)) >= 1 and len(scales(whole)) > len(scales(whole, after=6))
    assert resumed.losses == pytest.approx(whole.losses[6:], abs=LOSS_TOLERANCE)
    own = {path.name for path in saved.glob("recycle_stage_*.pt")}
    assert own == {"recycle_stage_00.pt", "recycle_stage_01.pt"} and not any("recycle_stage" in name for name in files(undisturbed[1]))
    (saved / "recycle_stage_01.pt").unlink()
    assert_one_line(start(*SCALED, load=True).finish(), "recycle_stage_01.pt is missing")
    (saved / "recycle_stage_00.pt").unlink()
    anew = start(*SCALED, load=True).finish()
    assert anew.code == 0 and scales(anew) != scales(resumed)
    assert [event["text"] for event in anew.of("warning") if "loss scale" in event["text"]] == [
        f"{saved} has no loss scale, since it is not of a job with recycle.loss_scaling: it stays at 256"
    ]


def test_a_worker_that_has_loaded_otherwise_than_its_peers_is_given_up(start, undisturbed):
    result = start("steps=11", shape=Shape(replicas=3), folder=str(undisturbed[1]), load=True, flip="1.1").finish()
    assert result.code == 0 and [event["seat"] for event in result.of("lost")] == ["1.1"], result.output[-6000:]
    assert result.of("lost")[0]["how"] == "its state after step 9 is unlike that of the stage's other replicas"


def test_of_two_that_have_loaded_differently_nobody_knows_which_is_right(start):
    result = start(save_at=[3], load_at=7, load_step=3, flip="1.1").finish()
    assert_one_line(result, "the job ends: the replicas 0.1, 1.1 differ after step 3, and no majority says which is right")
