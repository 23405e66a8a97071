"""Two hosts, as network namespaces, under the real launcher: one goes silent, which closes no connection, and may come
back.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from recycle_plugin.authentication.secret import SETTING
from recycle_plugin.core.vocabulary.instruction import Op
from recycle_plugin.lab.runs import environment
from recycle_plugin.launch import free_port
from recycle_plugin.observability.trace import read_traces
from tests.support.hosts import HostsRun
from tests.support.jobs import STEPS, WRAPPED, after_step, assert_one_line, assert_same_training, hold
from tests.support.launching import launching

SILENT = "nothing was heard from it or its supervisor for"
BREAK_S = 1.2  # less than the default deadline, which is 3 s, and more than an exponential back-off leaves of it
LOST = {"1.0", "1.1"}  # beta's replica


@pytest.fixture
def launch(server, tmp_path, pair):
    with launching(server, tmp_path, partial(HostsRun, pair)) as launch:
        yield launch
    for name in ("alpha", "beta"):
        pair.mend(name)


def wraps(*more: dict) -> dict:
    return {"script": WRAPPED, "RECYCLE_TEST_WRAP": json.dumps([{"name": "a_replica_a_host"}, *more])}


def test_a_job_over_two_hosts_is_the_same_training_whatever_the_network_does_for_a_moment(
    launch, reference, pair, tmp_path
):
    run = launch(**wraps(hold(tmp_path)))
    after_step(run, 5)
    pair.cut("beta")
    time.sleep(BREAK_S)
    pair.mend("beta")
    (tmp_path / "go").touch()
    assert_same_training(run.finish(), reference())
    assert run.others["beta"].wait(60) == 0


@pytest.mark.parametrize(
    "master, wrong", [("localhost", "is 127.0.0.1 on its own host"), ("nowhere.invalid", "is unknown on its own host")]
)
def test_a_master_address_that_others_cant_use_is_refused(master, wrong, tmp_path):
    place = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_SIZE": "2", "MASTER_ADDR": master, "MASTER_PORT": str(free_port())}
    done = subprocess.run(
        [sys.executable, "-m", "recycle_plugin.launch", "train.py"],
        env=environment(**place, **{SETTING: str(tmp_path / "secret")}),  # without one there is another thing to say
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert f"recycle: error: master address {master} {wrong}" in done.stderr


SEVERAL = {"WORLD_SIZE": "4", "LOCAL_SIZE": "2", "MASTER_ADDR": "10.77.0.1"}


@pytest.mark.parametrize("rank, local, lines", [("0", "0", 1), ("2", "0", 1), ("3", "1", 0)])
def test_several_hosts_without_a_place_for_the_secret_are_refused(pair, tmp_path, rank, local, lines):
    """On each host in one line, which says what to set."""
    done = refused(pair, tmp_path, rank, local)
    assert done.returncode == 1 and done.stderr.count("\n") == lines, done.stderr
    wanted = "recycle: error: this job is on several hosts, and its secret would not get to all of them: set recycle."
    assert lines == 0 or done.stderr.startswith(
        f"{wanted}secret_file, in the config that --deepspeed_config names, or "
    )


@pytest.mark.parametrize("mode, text", [(0o644, "x" * 64), (0o600, "too short")])
def test_a_secret_that_others_can_read_or_guess_is_refused(pair, tmp_path, mode, text):
    secret = tmp_path / "secret"
    secret.write_text(text)
    secret.chmod(mode)
    done = refused(pair, tmp_path, "0", "0", **{SETTING: str(secret)})
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert f"recycle: error: {secret} " in done.stderr and text not in done.stderr.replace(str(secret), "")


def test_the_secret_is_where_the_config_says(pair, tmp_path):
    """Here it is none, which is seen before the script runs."""
    secret, config = tmp_path / "secret", tmp_path / "ds_config.json"
    secret.mkdir()
    config.write_text(json.dumps({"recycle": {"secret_file": str(secret)}}))
    done = refused(pair, tmp_path, "0", "0", "--deepspeed_config", str(config))
    assert done.returncode == 1 and f"recycle: error: the job's secret at {secret} can't be read" in done.stderr, (
        done.stderr
    )


def refused(pair, folder, rank: str, local: str, *options: str, **more: str) -> subprocess.CompletedProcess:
    (folder / "train.py").touch()
    place = SEVERAL | {"RANK": rank, "LOCAL_RANK": local, "MASTER_PORT": str(free_port())} | more
    return subprocess.run(
        [*pair.entering("alpha"), sys.executable, "-m", "recycle_plugin.launch", str(folder / "train.py"), *options],
        env=environment(**place),
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.all_kills
def test_deepspeeds_own_command_starts_it_on_each_host(launch):
    run = launch("steps=5", cold=True, **wraps())
    result = run.finish()
    assert result.code == run.others["beta"].wait(60) == 0 and len(result.losses) == 5, result.output[-6000:]


def test_the_silence_of_a_host_is_its_death_to_the_others_and_its_own_end(launch, reference, pair, tmp_path):
    """It stays cut off: what it says, it says on its own."""
    run = launch("recycle.heartbeat_timeout_s=2", **wraps(hold(tmp_path)))
    after_step(run, 5)
    pair.cut("beta")
    (tmp_path / "go").touch()
    result = run.finish()
    assert_same_training(result, reference(), LOST)
    assert all(SILENT in event["how"] for event in result.of("lost")) and not result.of("confirmed")
    assert run.others["beta"].wait(60) != 0
    said = run.said_on("beta")
    assert said.count("has heard nothing from the coordinator for 16 s, so the others may have gone on without it") == 2
    assert "Traceback" not in said


def test_a_partition_that_heals_leaves_one_side(launch, reference, pair, tmp_path):
    """Both sides save checkpoints as long as they train; the smaller one has trained and saved nothing that the other
    doesn't know of.
    """
    saved = tmp_path / "saved"
    run = launch("recycle.trace=true", **wraps(hold(tmp_path), {"name": "save_each", "folder": str(saved), "steps": 2}))
    after_step(run, 5)
    pair.cut("beta")
    run.hear("lost", 2)
    after_step(run, STEPS - 4)
    assert run.others["beta"].poll() is None and not run.of("confirmed")
    pair.mend("beta")
    run.hear("confirmed", 2)
    (tmp_path / "go").touch()
    result = run.finish()
    assert_same_training(result, reference(), LOST)
    assert run.others["beta"].wait(60) == 0 and "Traceback" not in run.said_on("beta")

    together = max(event["step"] for event in result.of("committed") if event["workers"] == 4)
    stepped = {
        seat: [
            s.instruction.step
            for s in read_traces(result.folder / "trace")
            if str(s.seat) == seat and s.instruction.op is Op.STEP
        ]
        for seat in LOST
    }
    assert all(max(steps) <= together + 1 for steps in stepped.values()), "one step ahead of the commits, at most"
    assert all(max(steps_saved(saved, seat)) <= together for seat in LOST)
    assert steps_saved(saved, "0.0") == steps_saved(saved, "0.1") == list(range(2, STEPS + 1, 2))


def crash_beta(run, pair, tmp_path: Path):
    after_step(run, 5)
    pair.crash("beta")
    (tmp_path / "go").touch()
    return run.finish()


def by_file(tmp_path: Path, placement: str) -> tuple[str, str]:
    """Arguments of a script that reads its config from a file."""
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"recycle": {"enabled": True, "placement": placement}}))
    return "--deepspeed_config", str(path)


def test_a_host_goes_and_every_stage_has_a_replica_elsewhere(launch, reference, pair, tmp_path):
    """The ranks' seats are DeepSpeed's, and so is the training; only which of them beta has is not."""
    run = launch(
        *by_file(tmp_path, "spread"),
        script=WRAPPED,
        RECYCLE_TEST_WRAP=json.dumps([{"name": "config_file"}, hold(tmp_path)]),
    )
    result = crash_beta(run, pair, tmp_path)
    assert_same_training(result, reference(), LOST)
    (start,) = result.of("start")
    assert start["seats"] == {"0.0": 0, "1.0": 1, "0.1": 2, "1.1": 3}
    assert not [event for event in result.of("warning") if "holds every replica" in event["text"]]


def test_as_deepspeed_places_them_the_loss_of_a_host_is_that_of_a_stage(launch, pair, tmp_path):
    run = launch(
        *by_file(tmp_path, "deepspeed"),
        script=WRAPPED,
        RECYCLE_TEST_WRAP=json.dumps([{"name": "config_file"}, hold(tmp_path)]),
    )
    result = crash_beta(run, pair, tmp_path)
    assert_one_line(result, "the job ends: stage 1 has no live worker left")
    (warning,) = [event for event in result.of("warning") if "beta holds every replica of stage 1" in event["text"]]
    assert 'set recycle.placement to "spread"' in warning["text"]


def steps_saved(folder: Path, seat: str) -> list[int]:
    return list(map(int, (folder / f"seat{seat}.txt").read_text().split()))
