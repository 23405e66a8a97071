"""Checkpoints are there whole or not at all, whoever dies while they are saved or loaded."""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from pathlib import Path

import pytest
import torch

from recycle_plugin.core.messages.from_coordinator import TRY_AGAIN
from recycle_plugin.lab.runs import processes_with
from tests.support.jobs import CHECKPOINT, LOSS_TOLERANCE, Shape, assert_one_line, faults
from tests.support.launching import launching

PLAIN_TOO, PLAIN = pytest.mark.plain_too, pytest.mark.plain_too(deepspeed=False)
SAVES = [3, 6, 9]
STEPS = 12
FILES = {"deepspeed": 3, "plain": 1}  # of a stage: two layers, and the optimizer's state, or all in one


@pytest.fixture
def start(by_plan):
    """``start(*overrides, shape=, **plan)``: a run that saves to tmp_path/saved."""
    return partial(by_plan, f"steps={STEPS}")


@pytest.fixture(scope="module")
def known() -> dict[str, tuple[list[float], Path]]:
    """By vehicle what ``undisturbed`` gives: each is run once."""
    return {}


@pytest.fixture
def undisturbed(request, vehicle, known, tmp_path_factory):
    """(losses, folder) of a job that saves after each of SAVES and loses nobody."""
    if vehicle.name not in known:
        folder = tmp_path_factory.mktemp("undisturbed")
        plan = json.dumps({"folder": str(folder / "saved"), "save_at": SAVES})
        with launching(request.getfixturevalue(vehicle.server), folder, vehicle=vehicle) as launch:
            result = launch(f"steps={STEPS}", script=CHECKPOINT, RECYCLE_TEST_CHECKPOINT=plan).ended_well()
        known[vehicle.name] = result.losses, folder / "saved"
    return known[vehicle.name]


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def assert_whole(folder: Path, like: Path, step: int) -> None:
    """``folder`` names the checkpoint of ``step`` as the latest, has each one up to that whole, as undisturbed jobs
    write it, and nothing else.
    """
    assert (folder / "latest").read_text() == f"global_step{step}"
    saved = {
        name for name in files(like) if name == "latest" or int(name.split("/")[0].removeprefix("global_step")) <= step
    }
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


DEATHS = [  # of the victim's files "next" is the first one of the second save, and so on, where a save is repeated once
    ("0.0 at checkpoint.start:2", "1.1 at checkpoint.start:4"),
    ("0.0 at checkpoint.file:{next}", "0.1 at checkpoint.file:{repeated}"),
    ("0.0 at checkpoint.written:2", "0.1 at checkpoint.file:{third}"),
    ("0.0 at checkpoint.publish:2", "1.1 at checkpoint.written:3"),
    ("0.0 at checkpoint.named:2", "0.1 at checkpoint.file:{fourth}"),
    ("0.0 at checkpoint.latest:2", "0.1 at checkpoint.written:4"),
]


def kills(vehicle, deaths: tuple[str, ...]) -> str:
    files = FILES[vehicle.name]
    numbers = {
        "next": files + 1,
        "second": files + min(2, files),
        "repeated": 2 * files + min(2, files),
        "third": 3 * files,
        "fourth": 3 * files + 1,
    }
    return faults(*(f"kill {death.format(**numbers)}" for death in deaths))


@PLAIN_TOO
@pytest.mark.some_of(3)
@pytest.mark.parametrize(
    "deaths", [pytest.param(deaths, id=deaths[0].split(".")[-1].partition(":")[0]) for deaths in DEATHS]
)
def test_a_death_while_saving(start, vehicle, undisturbed, tmp_path, deaths):
    """One in the second save, and one in its repetition or in the third one; all three end up whole."""
    losses, like = undisturbed
    result = start(kills(vehicle, deaths), save_at=SAVES).ended_well()
    assert len(result.of("lost")) == 2 == len(result.of("fault")), result.output[-6000:]
    assert result.losses == pytest.approx(losses, abs=LOSS_TOLERANCE)
    assert_whole(tmp_path / "saved", like, SAVES[-1])


@PLAIN
@pytest.mark.parametrize("point", ("file", "publish"))
def test_everybody_dies_while_saving(start, vehicle, undisturbed, tmp_path, point):
    """The one before stays whole, and the one that is named."""
    seats = ("0.0", "0.1", "1.0", "1.1")
    deaths = [f"{seat} at checkpoint.{'written:2' if seat[0] == '1' else 'file:{second}'}" for seat in seats]
    if point == "publish":
        deaths = ["0.0 at checkpoint.publish:2", "1.0 at checkpoint.publish:1"]
    result = start(kills(vehicle, deaths), save_at=SAVES).finish()
    assert_one_line(result, "Last checkpoint: ")
    saved = tmp_path / "saved"
    assert not (saved / "global_step6").exists()
    for left in saved.glob("*.incomplete-*"):
        for path in left.iterdir():
            path.unlink()
        left.rmdir()
    assert_whole(saved, undisturbed[1], SAVES[0])


@PLAIN_TOO
def test_sigterm_to_everything_while_saving(start, undisturbed, tmp_path):
    """The checkpoint is finished, and the job ends at a commit; with code 75, to go on from that, where the workers'
    leaves are heard of before the supervisors' end.

    The process of the launcher for one host has all supervisors in it.
    """
    run = start("steps=1000", save_at=SAVES[:2], hold=True)
    saved = tmp_path / "saved"
    run.wait_for(lambda: list(saved.glob("global_step6.incomplete-*")), "the second save")
    supervisors = [
        process.pid for process in processes_with(run.mark) if process.pid != run.launcher.pid or run.one_host
    ]
    for pid in [*supervisors, *run.pids().values()]:
        os.kill(pid, signal.SIGTERM)
    (tmp_path / "flags").mkdir()
    (tmp_path / "flags" / "go").touch()
    result = run.finish()
    assert result.code in (0, TRY_AGAIN) and not result.of("lost") and result.of("finished"), result.output[-6000:]
    if result.code == 0:
        assert_whole(saved, undisturbed[1], 6)
    else:  # with one more, of the end
        (of_end,) = {path.name for path in saved.iterdir()} - {"latest", "global_step3", "global_step6"}
        assert (saved / "latest").read_text() == of_end
        assert {path.name for path in (saved / of_end).iterdir()} == {
            path.name for path in (saved / "global_step6").iterdir()
        }


@PLAIN_TOO
@pytest.mark.parametrize("deaths", ((), ("1.0 at load.start", "0.1 at load.end")), ids=("nobody", "two"))
def test_load_while_training(start, vehicle, undisturbed, deaths):
    """Back to the third step after the seventh, where the same numbers come once more; also where somebody dies
    meanwhile.
    """
    losses, _ = undisturbed
    result = start(kills(vehicle, deaths), save_at=[3], load_at=7, load_step=3).finish()
    assert result.code == 0 and len(result.of("lost")) == len(deaths), result.output[-6000:]
    assert result.losses == pytest.approx(losses[:7] + losses[3:], abs=LOSS_TOLERANCE)


@PLAIN
def test_another_number_of_replicas(start, undisturbed):
    result = start("steps=11", shape=Shape(replicas=3), folder=str(undisturbed[1]), load=True).finish()
    assert result.code == 0 and all(len(record["losses"]) == 2 for record in result.records.values()), result.output[
        -6000:
    ]


@PLAIN
def test_another_number_of_stages(start, vehicle, undisturbed):
    result = start(shape=Shape(replicas=2, stages=1), folder=str(undisturbed[1]), load=True).finish()
    assert_one_line(
        result,
        "is of 2 stages, and this pipeline has 1"
        if vehicle.name == "plain"
        else "is of 2 pipeline stages, and this job has 1",
    )


def test_other_numbers_of_replicas_and_stages(start, undisturbed):
    """With another number of stages weights alone are read."""
    losses, like = undisturbed
    result = start("steps=11", shape=Shape(replicas=3), folder=str(like), load=True).finish()
    assert result.code == 0 and all(len(record["losses"]) == 2 for record in result.records.values()), result.output[
        -6000:
    ]
    pair = Shape(replicas=2, stages=1)
    assert_one_line(
        start(shape=pair, folder=str(like), load=True).finish(), "is of 2 pipeline stages, and this job has 1"
    )
    result = start("steps=1", shape=pair, folder=str(like), load=True, module_only=True).finish()
    assert result.code == 0 and result.losses[0] < losses[0] - 0.1, result.output[-6000:]


# --- those that are made by themselves -------------------------------------------------------------------


@pytest.fixture
def run_until(start, tmp_path):
    """``run_until(enough, *overrides)``: the result of a job that ends once ``enough(run)``; how many checkpoints there
    are after so many steps is a matter of what they cost.
    """

    def run(enough, *overrides: str):
        go = tmp_path / "enough"
        job = start("steps=100000", *overrides, until=str(go))
        job.wait_for(lambda: enough(job), "enough checkpoints")
        go.touch()
        return job.ended_well()

    return run


def times(run, kind: str) -> list[float]:
    return [event["time"] for event in run.of(kind)]


@PLAIN_TOO
def test_checkpoints_by_themselves(start, run_until, vehicle, tmp_path):
    """Written while training goes on: the first whole, the second dropped since one of its writers dies, and made up
    for.
    """
    folder = tmp_path / "own"

    def made_up_for(run) -> bool:
        lost, made = times(run, "lost"), times(run, "checkpoint")
        return bool(lost and made) and made[-1] > lost[0]

    deaths = kills(vehicle, ("0.0 at checkpoint.file:{next}",))
    result = run_until(
        made_up_for, "recycle.checkpoint={overhead: 0.9, keep: 1}", f"recycle.checkpoint_dir={folder}", deaths
    )
    made = result.of("checkpoint")
    (lost,) = result.of("lost")
    assert sum(event["time"] < lost["time"] for event in made) == 1 and len(made) >= 2, result.output[-6000:]
    assert all(event["every"] >= event["cost_s"] / event["step_s"] / 0.9 - 1 for event in made[:1])
    assert {path.name for path in folder.glob("automatic_step*") if ".incomplete-" not in path.name} == {
        Path(made[-1]["path"]).name
    }
    step = int((folder / "latest").read_text().removeprefix("automatic_step"))
    assert made[-1]["path"] == str(folder / f"automatic_step{step}") and step > 11
    resumed, whole = (
        start(f"steps={step + 3}", folder=str(folder), load=True).finish(),
        start(f"steps={step + 3}").finish(),
    )
    assert resumed.code == whole.code == 0, resumed.output[-6000:]
    assert resumed.losses == pytest.approx(whole.losses[step:], abs=LOSS_TOLERANCE)
    common = min(len(result.losses), step + 3)
    assert result.losses[:common] == pytest.approx(whole.losses[:common], abs=LOSS_TOLERANCE)


@PLAIN
def test_steps_that_are_rejected_drop_no_checkpoint(run_until, tmp_path):
    """Each makes another membership of the same members."""
    settings = (
        "gradient_clipping=0.05",
        "recycle.clip=validate",
        "recycle.checkpoint={overhead: 0.9}",
        f"recycle.checkpoint_dir={tmp_path}/own",
    )
    result = run_until(lambda run: len(times(run, "checkpoint")) >= 2 and len(times(run, "rejected")) >= 25, *settings)
    assert len(result.of("rejected")) >= 5 / 6 * result.of("committed")[-1]["step"]


# --- what is in no file of stock's, and what is read wrongly --------------------------------------------

SCALED = (
    "gradient_clipping=1.25", "recycle.clip=validate", "recycle.nonfinite=skip", "recycle.loss_scaling=true",
    "deepspeed={fp16: {enabled: false, initial_scale_power: 8, loss_scale_window: 4, hysteresis: 1}}",
)  # fmt: skip


def scales(result, after: int = 0) -> dict[int, float]:
    return {event["step"]: event["scale"] for event in result.of("loss_scale") if event["step"] > after}


def test_the_loss_scale_goes_on_from_a_checkpoint(start, undisturbed, tmp_path):
    """It is in a file of its own; without that, as from stock DeepSpeed, it is as at a job's start, and that is
    said.
    """
    whole = start(*SCALED, save_at=[6]).finish()
    saved = tmp_path / "saved" / "global_step6"
    resumed = start(*SCALED, load=True).finish()
    assert whole.code == resumed.code == 0, resumed.output[-6000:]
    assert scales(resumed) == scales(whole, after=6) and len(scales(whole, after=6)) >= 1
    assert len(scales(whole)) > len(scales(whole, after=6))
    assert resumed.losses == pytest.approx(whole.losses[6:], abs=LOSS_TOLERANCE)
    own = {path.name for path in saved.glob("recycle_stage_*.pt")}
    assert own == {"recycle_stage_00.pt", "recycle_stage_01.pt"}
    assert not any("recycle_stage" in name for name in files(undisturbed[1]))
    (saved / "recycle_stage_01.pt").unlink()
    assert_one_line(start(*SCALED, load=True).finish(), "recycle_stage_01.pt is missing")
    (saved / "recycle_stage_00.pt").unlink()
    anew = start(*SCALED, load=True).finish()
    assert anew.code == 0 and scales(anew) != scales(resumed)
    assert [event["text"] for event in anew.of("warning") if "loss scale" in event["text"]] == [
        f"{saved} has no loss scale, since its job had no recycle.loss_scaling: this job's scale stays at 256"
    ]


@PLAIN
def test_a_worker_that_has_loaded_otherwise_than_its_peers_is_given_up(start, undisturbed):
    result = start("steps=11", shape=Shape(replicas=3), folder=str(undisturbed[1]), load=True, flip="1.1").finish()
    assert result.code == 0 and [event["seat"] for event in result.of("lost")] == ["1.1"], result.output[-6000:]
    assert result.of("lost")[0]["how"] == "its state after step 9 is unlike that of the stage's other replicas"


@PLAIN
def test_of_two_that_have_loaded_differently_nobody_knows_which_is_right(start):
    result = start(save_at=[3], load_at=7, load_step=3, flip="1.1").finish()
    assert_one_line(
        result,
        "the job ends: the replicas at seat 0.1 (rank 2), seat 1.1 (rank 3) differ after step 3, and no majority says "
        "which is right",
    )
