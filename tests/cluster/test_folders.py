"""The folder of a job is its own: who else wants it is refused, and changes nothing in it."""

from __future__ import annotations

import json

import pytest

from recycle_plugin.cli import main
from tests.support.jobs import ALONE, LOG, after_step, assert_one_line, faults, hold

pytestmark = pytest.mark.plain_too(deepspeed=False)


def test_a_second_job_in_a_run_folder_is_refused_and_the_first_goes_on(launch, vehicle, tmp_path):
    first = launch(RECYCLE_TEST_WRAP=json.dumps(hold(tmp_path)))
    after_step(first, 4)
    second = launch(f"run_dir={first.folder}").finish()
    assert_one_line(second, f"end: the job ends: recycle.run_dir: {first.folder} is the folder of job ")
    (tmp_path / "go").touch()
    result = first.finish()
    assert result.code == 0 and len(result.of("start")) == 1 and not result.of("end"), result.output[-6000:]
    assert [event["step"] for event in result.of("committed")] == list(range(1, 21))
    assert launch(f"run_dir={first.folder}").finish().code == 0  # once the first has ended


def test_clean_takes_nothing_from_a_job_that_runs(launch, vehicle, tmp_path, capsys):
    """It needs its log after that: a stage's only worker is killed, and its next process replays."""
    more = (*LOG, faults("kill 0.1 before 1F0.0@9"))
    run = launch(*more, shape=ALONE, RECYCLE_TEST_WRAP=json.dumps(hold(tmp_path)))
    after_step(run, 4)
    capsys.readouterr()
    assert main(["clean", str(run.folder), "--yes"]) == 1
    said = capsys.readouterr().out
    assert said.startswith(f"{run.folder}: kept: recycle.run_dir: {run.folder} is the folder of job ")
    assert said.endswith(", which runs\n") and said.count("\n") == 1
    (tmp_path / "go").touch()
    result = run.finish()
    assert result.code == 0 and len(result.of("replayed")) == 1, result.output[-6000:]


@pytest.mark.parametrize("setting", ("run_dir", "recycle.checkpoint_dir"))
def test_a_folder_that_cannot_be_made_is_refused_before_the_first_step(launch, vehicle, setting):
    result = launch(f"{setting}=/proc/x").finish()
    name = setting.removeprefix("recycle.")
    assert_one_line(
        result, f"recycle.{name}: the folder /proc/x can't be made or written to (No such file or directory)"
    )
    assert "step: 1:" not in result.output
