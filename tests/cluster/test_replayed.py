"""A stage that has lost its last worker is replayed from what its neighbours have logged, and nothing else is lost."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.half_precision import INFINITE, VALIDATED, changes, fp16, wrapped
from tests.support.jobs import ALONE, BF16, BOTH, CHECKPOINT, DEEPSPEED, LOG, PLAIN, WRAPPED, Shape, difference, faults
from tests.support.launching import Launch


@pytest.mark.some_of(4)
@BOTH
@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(("kill 0.1 before 1F0.0@6",), id="between two"),
        pytest.param(("kill 0.0 after 0STEP@7",), id="the first"),
        pytest.param(("kill 0.2 before 2STEP@7",), id="the last"),
        pytest.param(("kill 0.1 before 1F0.2@6", "kill 0.2 before 2F0.2@6"), id="two beside each other"),
        pytest.param(("kill 0.1 before 1F0.2@6", "kill 0.1#1 after 1F0.0@6"), id="twice"),
        pytest.param(("kill 0.1 before 1F0.0@6", "kill 0.2 before 2F0.0@9"), id="one after the other"),
    ],
)
def test_a_job_without_replicas_goes_on(launch: Launch, reference, kills):
    result = launch(*LOG, faults(*kills), shape=ALONE).ended_well()
    assert len(result.of("replayed")) == len(kills), result.output[-8000:]
    assert difference(result, reference(*LOG, shape=ALONE)).tolerated


@pytest.mark.some_of(2)
@BOTH
@pytest.mark.parametrize("exact", (True, False))
def test_a_stage_that_has_lost_all_replicas_is_replayed_by_one(launch: Launch, reference, exact):
    """The other one catches up from it later, or is started again too late for that."""
    more, kills = (*LOG, f"recycle.exact={exact}"), ("kill 0.1 before 1F0.0@6", "kill 1.1 before 1F1.0@6")
    result = launch(*more, faults(*kills), shape=Shape(2, 2, 2)).ended_well()
    assert len(result.of("replayed")) == 1, result.output[-8000:]
    found = difference(result, reference(*more, shape=Shape(2, 2, 2)))
    assert found.tolerated and (not exact or found.none)


FOUR = {
    **{f"stage {stage}": (f"kill 0.{stage} before {stage}F0.1@6",) for stage in range(4)},
    "two beside each other": ("kill 0.1 before 1F0.2@6", "kill 0.2 after 2I0.1@6"),
    "first and last": ("kill 0.0 before 0REDUCE@6", "kill 0.3 before 3F0.2@6"),
    "neighbours one after the other": ("kill 0.1 before 1F0.0@6", "kill 0.2 before 2STEP@7"),
    "again while it is replayed": ("kill 0.2 before 2F0.2@6", "kill 0.2#1 after 2F0.0@6"),
    "another while one is replayed": ("kill 0.2 before 2F0.2@6", "kill 0.1 at recovery.report:2"),
}


@pytest.mark.all_kills
@pytest.mark.parametrize("vehicle", (PLAIN,), ids=("plain",), indirect=True)
@pytest.mark.parametrize("kills", FOUR.values(), ids=FOUR)
def test_four_stages_without_replicas(launch: Launch, reference, kills):
    more, shape = (*LOG, "recycle.exact=true", "model.layers=4"), Shape(1, 4, 4)
    result = launch(*more, faults(*kills), shape=shape).ended_well()
    assert len(result.of("replayed")) == len(kills), result.output[-8000:]
    assert difference(result, reference(*more, shape=shape)).none


@pytest.mark.all_kills
@pytest.mark.parametrize("vehicle", (PLAIN,), ids=("plain",), indirect=True)
@pytest.mark.parametrize("stage", range(4))
def test_four_stages_of_two_of_which_one_is_lost_whole(launch: Launch, reference, stage):
    more, shape = (*LOG, "recycle.exact=true", "model.layers=4"), Shape(2, 4, 4)
    kills = faults(*(f"kill {replica}.{stage} before {stage}F{replica}.1@6" for replica in (0, 1)))
    result = launch(*more, kills, shape=shape).ended_well()
    assert len(result.of("replayed")) == 1, result.output[-8000:]
    assert difference(result, reference(*more, shape=shape)).none


MORE = {
    "bf16": (DEEPSPEED, (BF16,)),
    "tied": (DEEPSPEED, ("model.tied=true",)),
    "clipped later": (DEEPSPEED, ("gradient_clipping=1.25", "recycle.clip=validate")),
    "clipped at once": (PLAIN, ("optimizer=sgd", "gradient_clipping=0.55")),
    "exact, in blocks": (PLAIN, ("recycle.exact=2",)),
    "set by the script": (PLAIN, ("by_hand=true", "recycle.exact=true")),
    "fused, with a scheduler": (PLAIN, ("recycle.split_backward=false", "schedule=true")),
}


@pytest.mark.some_of(4)
@pytest.mark.parametrize("vehicle, more", MORE.values(), ids=MORE, indirect=["vehicle"])
@pytest.mark.parametrize("kill", ("kill 0.0 before 0F0.1@6", "kill 0.2 after 2REDUCE@6"))
def test_it_is_the_same_training(launch: Launch, reference, more, kill):
    """Dropout is in all of them."""
    result = launch(*LOG, *more, faults(kill), shape=ALONE).ended_well()
    assert len(result.of("replayed")) == 1, result.output[-8000:]
    found = difference(result, reference(*LOG, *more, shape=ALONE))
    assert found.tolerated and ("recycle.exact=true" not in more or found.none)


@pytest.mark.parametrize("seat", ("0.0", "0.2"))
def test_in_fp16_a_skipped_step_is_skipped_again(launch: Launch, seat):
    """Step 4 overflows in one stage, and the loss scale goes with it; mostly no checkpoint comes between."""
    settings = (fp16(), VALIDATED, *LOG, "recycle.report=false")
    calm = launch(*settings, shape=ALONE, **wrapped(INFINITE)).finish()
    result = launch(
        *settings, faults(f"kill {seat} before {seat[-1]}F0.1@7"), shape=ALONE, **wrapped(INFINITE)
    ).finish()
    assert result.code == calm.code == 0, result.output[-8000:]
    assert len(result.of("replayed")) == 1 and {event["step"] for event in result.of("rejected")} >= {4}
    assert result.losses == calm.losses and changes(result) == changes(calm)


@pytest.mark.some_of(4)
@BOTH
@pytest.mark.parametrize("seat", ("0.0", "0.1", "0.2"))
@pytest.mark.parametrize("at", ("0F0.1@-2", "checkpoint.written:1", "checkpoint.publish:2"))
def test_whoever_is_lost_while_all_do_something_together(launch: Launch, tmp_path, seat, at):
    """An evaluation is made again, and a checkpoint written again, by all: who has come back takes part in it."""
    at = f"before {seat[-1]}{at[1:]}" if at.startswith("0F") else f"at {at}"
    if at.startswith("at checkpoint.publish") and seat != "0.0":
        pytest.skip("only the first worker gives a checkpoint its name")
    plan = json.dumps({"folder": str(tmp_path / "saved"), "evaluate_at": 4, "times": 3, "save_at": [4]})
    automatic = "++recycle.checkpoint.overhead=0.0001"  # so that there is one, before the first step
    options = (*LOG[:1], automatic, LOG[2], "steps=8")
    result = launch(
        *options, faults(f"kill {seat} {at}"), shape=ALONE, script=CHECKPOINT, RECYCLE_TEST_CHECKPOINT=plan
    ).ended_well()
    assert len(result.of("replayed")) == 1, result.output[-8000:]
    calm = launch(*options, shape=ALONE, script=CHECKPOINT, RECYCLE_TEST_CHECKPOINT=plan).finish()
    assert result.losses == pytest.approx(calm.losses, abs=5e-6)
    evaluated = {rank: record["evaluated"] for rank, record in calm.records.items()}
    for rank, record in result.records.items():
        assert record["evaluated"] == pytest.approx(evaluated[rank], abs=5e-6)
    assert (tmp_path / "saved" / "global_step4").is_dir()


def wrap(*wraps: dict) -> dict[str, str]:
    return {"script": WRAPPED, "RECYCLE_TEST_WRAP": json.dumps(wraps)}


def segments(folder: Path, rank: int) -> list[Path]:
    return sorted((folder / "log").glob(f"{rank}.0-*.log"))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def pipe(path: Path) -> None:
    """Who opens it to read would wait for one that writes."""
    path.unlink()
    os.mkfifo(path)


def of_another_run(path: Path) -> None:
    shutil.copy(segments(path.parents[2] / "run0", 0)[-1], path)


WRONG = {
    "flipped byte": (flip, "damaged: CRC"),
    "truncated": (cut, "truncated at byte"),
    "missing": (Path.unlink, "no log of stage 0 is in"),
    "a pipe": (pipe, "is no file"),
    "another run's": (of_another_run, "is of "),
}


@pytest.mark.some_of(2)
@BOTH
@pytest.mark.parametrize("case", WRONG)
def test_a_log_that_is_not_what_was_written_is_named_and_its_stage_replays_along(launch: Launch, reference, case):
    """Whoever has written it makes it once more, from the checkpoint, and has its own state again."""
    (damage, named), more = WRONG[case], (*LOG, "recycle.exact=true")
    if case == "another run's":
        assert launch(*more, shape=ALONE).finish().code == 0
    run = launch(*more, faults("kill 0.1 before 1F0.0@9"), shape=ALONE)
    run.hear("lost")
    for path in segments(run.folder, 0):  # what stage 0 has sent to the one that is to be replayed
        damage(path)
    result = run.finish()
    assert result.code == 0 and len(result.of("replayed")) == 1, result.output[-6000:]
    (why,) = [event["along"]["0"] for event in result.of("recovery") if event["along"]]
    assert named in why and str(run.folder / "log") in why
    assert [event["seat"] for event in result.of("accompanied")] == ["0.0"]
    assert difference(result, reference(*more, shape=ALONE)).none


def damaged_checkpoint(folder: Path) -> None:
    """One bit of the file of the lost stage."""
    for path in folder.glob("checkpoint/automatic_step*/*"):
        if "stage_01" in path.name or path.name.startswith("layer_02"):
            flip(path)


@BOTH
def test_a_damaged_checkpoint_is_named_and_trains_nothing(launch: Launch):
    run = launch(*LOG, faults("kill 0.1 before 1F0.0@9"), shape=ALONE)
    run.hear("lost")
    damaged_checkpoint(run.folder)
    result = run.finish()
    said = [event for event in result.of("recovery") if event["way"] == "end"]
    assert result.code != 0 and len(said) == 1 and "is damaged: " in said[0]["why"], result.output[-6000:]


@BOTH
@pytest.mark.parametrize("removed", ("all of it", "a file"))
def test_a_checkpoint_that_was_removed_ends_the_job_at_once_and_an_older_one_is_named(launch: Launch, removed):
    """Nothing leads from that to what the others have."""
    often = wrap({"name": "checkpoint_every", "steps": 3})
    run = launch(*LOG, faults("kill 0.1 before 1F0.0@12"), shape=ALONE, **often)
    run.hear("lost")
    older, last = [event["path"] for event in run.of("checkpoint")][-2:]
    for path in Path(last).glob("*"):
        if removed == "all of it" or "stage_01" in path.name or path.name.startswith("layer_02"):
            path.unlink()
    if removed == "all of it":
        Path(last).rmdir()
    result = run.finish()
    (end,) = result.of("end")
    why = {"all of it": f"its checkpoint {last} was removed", "a file": f"the checkpoint {last} can't be loaded: load"}
    assert why[removed] in end["text"] and end["text"].endswith(f"Last checkpoint: {older}")
    assert result.code == 1 and len(result.of("restart")) == 1 and "Error" not in result.output, result.output[-6000:]


@pytest.mark.parametrize("vehicle", (PLAIN,), ids=("plain",), indirect=True)
@pytest.mark.parametrize("draws", (True, False))
def test_random_numbers_that_nobody_can_draw_again_are_found(launch: Launch, draws):
    """A log has what was made of those that were drawn; who replays would draw others."""
    more = ("recycle.rng=stream", "recycle.reroute=false", f"dropout={0.1 * draws}")
    result = launch(*LOG, *more, faults("kill 0.1 before 1F0.2@6"), shape=ALONE).finish()
    said = [event["why"] for event in result.of("recovery") if event["way"] == "end"]
    assert (result.code != 0) == draws and len(result.of("replayed")) == (not draws), result.output[-6000:]
    assert ["differs from what was sent" in why for why in said] == [True] * draws


@pytest.mark.parametrize("vehicle", (PLAIN,), ids=("plain",), indirect=True)
def test_a_full_disk_stops_the_log_and_not_the_training(launch: Launch, reference, tmp_path):
    """It says from which step on nothing can be replayed; nobody waits for it."""
    result = launch(*LOG, "++recycle.log.ring_bytes=2000", shape=ALONE).finish()
    assert result.code == 0 and not result.of("lost"), result.output[-6000:]
    assert any("2000 bytes wait for the disk" in event["why"] for event in result.of("log_broken"))
    assert result.losses == reference(*LOG, shape=ALONE).losses


@pytest.fixture
def small_disk(tmp_path):
    """A file system in memory that is full soon."""
    folder = tmp_path / "small"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "none", str(folder)], capture_output=True)
    if made.returncode:
        pytest.skip(f"nothing can be mounted here: {made.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize("vehicle", (PLAIN,), ids=("plain",), indirect=True)
@pytest.mark.parametrize("room_again", (True, False))
def test_a_stage_whose_log_found_its_disk_full_replays_along_once_there_is_room(
    launch: Launch, reference, small_disk, room_again
):
    """Until then the last checkpoint is what there is, and the end of the job names both."""
    more, seldom = (*LOG, "recycle.exact=true"), wrap({"name": "checkpoint_every", "steps": 1000})
    where = f"++recycle.log.folder={small_disk}"
    filler = small_disk / "filler"
    filler.write_bytes(bytes(480_000))
    run = launch(*more, where, faults("kill 0.1 before 1F0.0@9"), shape=ALONE, **seldom)
    run.hear("log_broken", 3)
    if room_again:
        filler.unlink()
    result = run.finish()
    broken = [event["why"] for event in result.of("log_broken")]
    named = rf"disk full: {small_disk} can't be written, [\d.e+]+ (B|KiB) of 512 KiB are free"
    assert re.fullmatch(named, broken[0]), broken
    if room_again:
        assert result.code == 0 and len(result.of("replayed")) == 1 and result.of("accompanied"), result.output[-6000:]
        assert difference(result, reference(*more, shape=ALONE)).none
    else:
        (end,) = result.of("end")
        assert result.code and re.search(named, end["text"]) and "Last checkpoint: /" in end["text"], end


@pytest.mark.parametrize("vehicle", (PLAIN,), ids=("plain",), indirect=True)
def test_who_is_killed_while_one_segment_follows_another_is_replayed_and_its_log_is_read(launch: Launch, reference):
    more = (*LOG, "recycle.exact=true")
    dying = wrap({"name": "killed_in_rotation", "rank": 1, "number": 4, "segment_bytes": 20_000})
    result = launch(*more, faults("kill 0.2 before 2F0.1@11"), shape=ALONE, **dying).ended_well()
    assert [event["seat"] for event in result.of("replayed")] == ["0.1", "0.2"], result.output[-6000:]
    assert difference(result, reference(*more, shape=ALONE)).none


@pytest.mark.parametrize("vehicle", (PLAIN,), ids=("plain",), indirect=True)
def test_logs_are_where_they_are_to_be(launch: Launch, tmp_path):
    where = tmp_path / "elsewhere"
    result = launch(*LOG, f"++recycle.log.folder={where}", faults("kill 0.1 before 1F0.0@6"), shape=ALONE).finish()
    assert result.code == 0 and len(result.of("replayed")) == 1, result.output[-6000:]
    assert segments(where.parent / "run0", 0) == [] and list(where.glob("*.log"))
