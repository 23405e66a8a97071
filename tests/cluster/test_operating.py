"""Seats leave a running job, and come back, as an operator asks from another terminal."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from functools import partial

import psutil
import pytest

from recycle_plugin.authentication.secret import Secret
from recycle_plugin.cli import main
from recycle_plugin.core.messages.encoding import CONTROL
from recycle_plugin.core.messages.from_coordinator import TRY_AGAIN
from recycle_plugin.runtime.control.operator_access import FILE, OperatorAccess
from tests.support.cluster import Run
from tests.support.hosts import HostsRun
from tests.support.jobs import LOSS_TOLERANCE, WRAPPED, after_step, assert_same_training, difference, held
from tests.support.launching import Launch, launching

STEPS = 150


def heard(run: Run, kind: str, **details: object) -> dict:
    """The first event of this kind with these details, once there is one."""
    return run.wait_for(
        lambda: next(
            (each for each in run.events() if each["event"] == kind and details.items() <= each.items()),
            None,
        ),
        f"{kind} {details}",
    )


def asks(capsys, run: Run, *command: str) -> tuple[int, str]:
    """The exit code of a ``recycle`` command on the job, and the line that it prints."""
    capsys.readouterr()
    code = main([*command, "--run", str(run.folder)])
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    return code, said.strip()


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.plain_too
def test_a_seat_leaves_and_is_admitted_again(launch: Launch, reference, tmp_path, capsys):
    """The job is held at a step before it leaves, and at one before it is back."""
    gates = [held(tmp_path / name, step, "go") for name, step in (("first", 6), ("second", 30))]
    run = launch(f"steps={STEPS}", script=WRAPPED, RECYCLE_TEST_WRAP=json.dumps(gates))
    after_step(run, 3)
    assert stat.S_IMODE((run.folder / FILE).stat().st_mode) == 0o600
    assert asks(capsys, run, "admit", "1.1") == (1, "seat 1.1 (rank 3) is live")
    assert asks(capsys, run, "leave", "1.1") == (0, "seat 1.1 (rank 3) leaves at the next commit")
    assert asks(capsys, run, "leave", "0.1") == (1, "stage 1 would have no worker left")
    assert asks(capsys, run, "leave", "7.1") == (1, "there is no seat 7.1: this job has 0.0, 0.1, 1.0, 1.1")
    (tmp_path / "first" / "go").touch()
    heard(run, "left", rank=3)
    assert asks(capsys, run, "leave", "1.1") == (1, "no worker holds seat 1.1: it is lost, or has left")
    assert asks(capsys, run, "admit", "1.1") == (0, "seat 1.1: its supervisor starts it again")
    assert asks(capsys, run, "admit", "1.1") == (1, "seat 1.1 is coming back already")
    heard(run, "newcomer", rank=3)
    access = OperatorAccess.read(run.folder)
    assert access is not None and main(["status", "{}:{}".format(*access.address), "--json"]) == 0, "by its address"
    known = json.loads(capsys.readouterr().out)
    assert known["live"] == ["0.0", "0.1", "1.0"] and known["copies"] == {"0": 2, "1": 1}
    assert [(each["seat"], each["rank"]) for each in known["joining"]] == [("1.1", 3)]
    (tmp_path / "second" / "go").touch()
    result = run.finish()
    whole = reference(f"steps={STEPS}")
    assert result.code == 0, result.output[-6000:]
    assert [each["seat"] for each in result.of("rejoined")] == ["1.1"] and not result.of("lost")
    assert result.records.keys() == whole.records.keys() and difference(result, whole).tolerated
    over = asks(capsys, run, "leave", "1.1")
    assert over[0] == 1 and over[1].startswith("the job is over: all workers have left")
    assert not (run.folder / FILE).exists()


@pytest.mark.plain_too(deepspeed=False)
def test_only_the_jobs_own_user_can_ask_and_by_the_same_version(
    launch: Launch, reference, tmp_path, capsys, monkeypatch
):
    run = launch(f"steps={STEPS}", script=WRAPPED, RECYCLE_TEST_WRAP=json.dumps(held(tmp_path, 12, "go")))
    after_step(run, 3)
    access = OperatorAccess.read(run.folder)
    assert access is not None
    (run.folder / FILE).unlink()
    assert OperatorAccess(access.address, Secret("0" * 64)).write(run.folder) == ""
    code, said = asks(capsys, run, "leave", "1.1")
    assert code == 1 and "(it does not know this job's secret)" in said
    heard(run, "stranger", address="127.0.0.1")
    access.write(run.folder)
    address = "{}:{}".format(*access.address)
    with monkeypatch.context() as patched:
        patched.setattr(CONTROL, "version", CONTROL.version ^ 1)
        code, said = asks(capsys, run, "admit", "1.1")
        assert code == 1 and said.endswith("all need the same version of the plugin")
        assert main(["status", address]) == 2
        assert capsys.readouterr().err.endswith("all need the same version of the plugin\n")
    heard(run, "warning")
    capsys.readouterr()
    assert main(["leave", "1.1", "--run", address]) == 0, "by its address"
    assert capsys.readouterr().out == "seat 1.1 (rank 3) leaves at the next commit\n"
    (tmp_path / "go").touch()
    assert_same_training(run.finish(), reference(f"steps={STEPS}"), left={"1.1"})


def test_a_host_is_drained_and_its_launcher_ends_alone(server, pair, reference, tmp_path):
    """beta's replica leaves; one of its seats is admitted, and held back again, before it takes part.  Then SIGTERM to
    what the launcher has started there is no word on the job.
    """
    wraps = [{"name": "a_replica_a_host"}, *(held(tmp_path, step, f"go{step}") for step in (10, 40))]
    with launching(server, tmp_path, partial(HostsRun, pair)) as launch:
        run = launch(f"steps={STEPS}", script=WRAPPED, RECYCLE_TEST_WRAP=json.dumps(wraps))

        def asks(*command: str) -> tuple[int, str]:
            recycle = [sys.executable, "-m", "recycle_plugin.cli", *command, "--run", str(run.folder)]
            done = subprocess.run([*pair.entering("alpha"), *recycle], capture_output=True, text=True, timeout=120)
            assert not done.stderr
            return done.returncode, done.stdout.strip()

        after_step(run, 3)
        assert asks("drain", "gamma") == (1, "no seat is on host gamma: the job's are on alpha, beta")
        code, said = asks("drain", "beta")
        assert code == 0 and said.endswith(" leave at the next commit") and "seat 1.0" in said and "seat 1.1" in said
        assert asks("drain", "alpha") == (1, "stage 0 would have no worker left")
        (tmp_path / "go10").touch()
        run.hear("left", 2)
        assert asks("admit", "1.1") == (0, "seat 1.1: its supervisor starts it again")
        newcomer = heard(run, "newcomer", seat="1.1")
        pid = heard(run, "worker", rank=newcomer["rank"], incarnation=1)["pid"]
        os.kill(pid, signal.SIGSTOP)  # it gets no further while the next word is on its way
        assert asks("drain", "beta") == (0, "no worker is left on host beta, and none is started there")
        run.wait_for(lambda: has_ended(pid), f"end of process {pid}")
        os.kill(run.others["beta"].pid, signal.SIGTERM)
        run.others["beta"].wait(60)
        (tmp_path / "go40").touch()
        result = run.finish()
    assert_same_training(result, reference(f"steps={STEPS}"), left={"1.0", "1.1"})
    assert not result.of("terminate") and not result.of("rejoined")


def test_hosts_that_get_a_notice_go_and_the_coordinators_ends_the_job(server, pair, reference, tmp_path):
    """beta's replica leaves at a commit, and the others go on; then alpha gets one, and the end has a checkpoint."""
    wraps = [{"name": "a_replica_a_host"}, *(held(tmp_path, step, f"go{step}") for step in (10, 40))]
    with launching(server, tmp_path, partial(HostsRun, pair)) as launch:
        asks = f"recycle.leave_on='test -e {tmp_path}/notice.$(hostname)'"
        run = launch("steps=100000", asks, script=WRAPPED, RECYCLE_TEST_WRAP=json.dumps(wraps))
        after_step(run, 3)
        (tmp_path / "notice.beta").touch()
        assert heard(run, "notice")["host"] == "beta"
        (tmp_path / "go10").touch()
        run.hear("left", 2)
        (tmp_path / "notice.alpha").touch()
        heard(run, "notice", host="alpha")
        (tmp_path / "go40").touch()
        result = run.finish()
        run.others["beta"].wait(60)
    last = result.of("committed")[-1]["step"]
    assert result.code == TRY_AGAIN and not result.of("lost") and not result.of("restart"), result.output[-6000:]
    assert {event["seat"] for event in result.of("leaving")} == {"1.0", "1.1"}
    assert "host alpha is to be taken away" in result.of("finished")[0]["text"]
    assert result.of("checkpoint")[-1]["path"].endswith(f"global_step{last}") and 11 <= last < 100
    said, whole = {event["step"]: event["loss"] for event in result.of("loss")}, reference(f"steps={STEPS}").losses
    assert len(said) > 11
    assert said == pytest.approx({step: whole[step - 1] for step in said}, abs=LOSS_TOLERANCE)
