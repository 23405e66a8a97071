"""The coordinator's host dies, or is cut off: the job goes on from another host, and never from two."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from recycle_plugin.authentication.secret import SETTING
from recycle_plugin.lab.runs import environment
from tests.support.hosts import HostsRun, NoHosts
from tests.support.jobs import (
    BOTH,
    LOG,
    PLAIN,
    WRAPPED,
    Shape,
    after_step,
    assert_same_training,
    difference,
    faults,
    held,
    hold,
)
from tests.support.launching import launching

FOUR, FIVE = Shape(replicas=4, stages=1), Shape(replicas=5, stages=1)  # a worker on each host
TWO_STAGES = Shape(replicas=2, stages=2)  # the first on alpha and beta, the second on gamma and delta
DEADLINE = "recycle.heartbeat_timeout_s=3"
LOSS, DELAY_S, LOSSY_S = 0.3, 0.2, 10.0
CUTS = ("cut", "mute", "deaf")  # a host's line in both directions, or in one
GOES_ON = "and more than half of the workers have turned to 10.77.0.2:"


@pytest.fixture
def launch(request, vehicle, tmp_path, four):
    with launching(request.getfixturevalue(vehicle.server), tmp_path, partial(HostsRun, four), vehicle) as launch:
        yield launch
    for name in four.names:
        four.mend(name)


@pytest.fixture
def launch_on_five(request, vehicle, tmp_path, five):
    with launching(request.getfixturevalue(vehicle.server), tmp_path, partial(HostsRun, five), vehicle) as launch:
        yield launch
    for name in five.names:
        five.mend(name)


def start(launch, folder: Path, *more: str, early: tuple[dict, ...] = (), shape: Shape = FOUR):
    """A job that does not end before there is the file ``folder``/go; returned once somebody stands by elsewhere.
    ``early``: where else it waits, and what else is changed.
    """
    wrap = json.dumps([hold(folder), *early])
    run = launch(DEADLINE, *more, script=WRAPPED, shape=shape, RECYCLE_TEST_WRAP=wrap)
    after_step(run, 4)
    stands_by(run, 1)
    return run


def stands_by(run, term: int, more: int = 0) -> None:
    """... on another host, since this term or a later one."""
    run.wait_for(
        lambda: [each for each in run.of("standby") if each.get("address") and each["term"] >= term],
        f"process that stands by in term {term}",
    )


def goes_on_without(run, seat: str) -> bool:
    """Whether all others have resumed since this loss: before, its worker counts for who may coordinate."""
    kinds = [(each["event"], each.get("seat")) for each in run.events()]
    return ("lost", seat) in kinds and ("resume", None) in kinds[kinds.index(("lost", seat)) :]


def host_process(run) -> psutil.Process:
    """The coordinator's, on the host where the run's launcher is."""
    found = psutil.Process(run.launcher.pid).children(recursive=True)
    return next(process for process in found if process.name() == "recycle-host")


def strike(run, hosts, what: str, number: int = 1) -> None:
    """... the coordinator, for the ``number``-th time; returns once another one goes on."""
    first, stays = hosts.names[number - 1], psutil.Process(run.launcher.pid)
    if what == "supervisor":
        # a struck one's successor is told of before it is there, and has its name a moment later
        there = lambda: [each for each in stays.children(recursive=True) if each.name() == "recycle-super"]
        (old,) = run.wait_for(there, "supervisor")
        old.kill()
        said = "was killed by signal 9: another one goes on"
        run.wait_for(lambda: run.output.count(said) == number, "another supervisor")
        return
    if what == "process":
        run.wait_for(lambda: len([each for each in run.of("standby") if each.get("pid")]) >= number, "standby here")
        host_process(run).kill()
    elif what == "host":
        run.crash(first)
    else:
        {"cut": hosts.cut, "mute": hosts.mute, "deaf": hosts.deafen}[what](first)
    run.hear("coordinator", number)
    if what in CUTS:
        assert run.launcher.wait(90) != 0
        hosts.mend(first)
        run.forsake(first)


def end(run, folder: Path):
    (folder / "go").touch()
    result = run.finish()
    for launcher in run.others.values():
        launcher.wait(90)
    return result


@pytest.mark.plain_too
@pytest.mark.parametrize("loses_power", (False, True), ids=("crashes", "loses power"))
def test_the_coordinators_host_dies(loses_power, launch, reference, four, tmp_path):
    """Next commit within some 3 s: if it crashes, others wait 1.5 s for a process that takes its place there; if no
    connection is closed, ``heartbeat_timeout_s``.
    """
    run = start(launch, tmp_path)
    died = time.time()
    if loses_power:
        four.cut("alpha")
    run.crash("alpha")
    run.hear("coordinator")
    result = end(run, tmp_path)
    assert_same_training(result, reference(shape=FOUR), {"0.0"})
    (told,) = result.of("coordinator")
    behind = result.events[result.events.index(told) :]
    committed = next(each for each in behind if each["event"] == "committed")
    after = [round(each["time"] - died, 2) for each in (told, committed)]
    print("seconds until another coordinator, and until the next commit:", after)
    assert [run.others[name].wait(60) for name in ("gamma", "delta")] == [0, 0]
    assert "the coordinator on host alpha is silent" in told["text"] and GOES_ON in told["text"]


@pytest.fixture
def vehicle(request):
    return getattr(request, "param", PLAIN)


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(moment, marks=pytest.mark.all_kills)
        for moment in ("before 0F0.0@6", "after 0W0.0@6", "before 0REDUCE@6", "after 0REDUCE@6", "after 0STEP@6")
    ],
)
def test_the_coordinators_host_dies_with_its_worker_at(moment, launch, reference, tmp_path):
    """... a named instruction: the host within a moment of the worker, which has told what it had by then."""
    run = start(launch, tmp_path, faults(f"kill 0.0 {moment}"), early=(held(tmp_path, 6, "go6"),))
    worker = psutil.Process(run.pids()[0])
    (tmp_path / "go6").touch()
    psutil.wait_procs([worker], timeout=60)
    run.crash("alpha")
    run.hear("coordinator")
    result = end(run, tmp_path)
    assert_same_training(result, reference(shape=FOUR), {"0.0"})


@pytest.mark.all_kills
@BOTH
@pytest.mark.parametrize("what", ("process", "supervisor", "host", *CUTS))
@pytest.mark.parametrize(
    "moment", ("before 0F3.0@6", "after 0W3.0@6", "before 0REDUCE@6", "after 0REDUCE@6", "after 0STEP@6")
)
def test_twice_in_turn_beside_a_workers_loss_and_return(moment, what, launch_on_five, reference, five, tmp_path):
    """A worker is killed at a named instruction, and the coordinator with it; the next one while the worker comes back,
    or once it has, if a host more is lost with it.
    """
    gates = held(tmp_path, 6, "go6", "0F3.0"), held(tmp_path, 9, "go9")
    run = start(
        launch_on_five, tmp_path, "recycle.rejoin=always", faults(f"kill 3.0 {moment}"), early=gates, shape=FIVE
    )
    worker, lost = psutil.Process(run.pid_of("3.0")), {"3.0"}
    (tmp_path / "go6").touch()
    psutil.wait_procs([worker], timeout=60)
    strike(run, five, what)
    if what in ("process", "supervisor"):
        strike(run, five, what, 2)
    run.hear("caught_up")
    (tmp_path / "go9").touch()
    run.hear("rejoined")
    if what not in ("process", "supervisor"):
        run.wait_for(lambda: goes_on_without(run, "0.0"), "resume without the first host")
        stands_by(run, 4)
        strike(run, five, what, 2)
        run.wait_for(lambda: goes_on_without(run, "1.0"), "resume without the second host")
        lost |= {"0.0", "1.0"}
    result = end(run, tmp_path)
    assert_same_training(result, reference(shape=FIVE), lost)


@BOTH
@pytest.mark.parametrize("what", ("process", "supervisor", "host", *CUTS))
def test_while_a_stage_is_replayed_from_the_log(what, launch, reference, four, tmp_path):
    """It was lost whole, and the one that replays it waits in the middle of that until it has happened: where rank 0's
    host goes, the other one goes on with it, or begins anew.
    """
    more = (*LOG, faults("kill 0.0 before 0F0.0@8", "kill 1.0 before 0F1.0@8"))
    changes = {"name": "checkpoint_every", "steps": 1000}, held(tmp_path, 8, "go8"), held(tmp_path, 8, "go8", "0F1.0")
    waits = {"name": "replay_waits", "folder": str(tmp_path), "step": 5, "until": "go5"}
    run = start(launch, tmp_path, *more, early=(*changes, waits), shape=TWO_STAGES)
    (tmp_path / "go8").touch()
    run.wait_for(lambda: list(tmp_path.glob("replays-*")), "replay")
    print("replays:", *[path.name for path in tmp_path.glob("replays-*")])
    strike(run, four, what)
    (tmp_path / "go5").touch()
    run.hear("replayed")
    result = end(run, tmp_path)
    found = difference(result, reference(*LOG, shape=TWO_STAGES))
    assert result.code == 0 and found.tolerated and len(result.of("replayed")) == 1, result.output[-6000:]
    assert {each["seat"] for each in result.of("lost")} == {"0.0", "1.0"}
    print("losses differ by", found.loss, "parameters by", found.parameters)


def test_two_coordinators_hosts_die_in_turn(launch, reference, tmp_path):
    run = start(launch, tmp_path)
    run.crash("alpha")
    run.hear("lost")
    run.wait_for(lambda: goes_on_without(run, "0.0"), "resume without the first host")  # the standby knows by then
    stands_by(run, 4)
    run.crash("beta")
    run.hear("coordinator", 2)
    result = end(run, tmp_path)
    assert_same_training(result, reference(shape=FOUR), {"0.0", "1.0"})


def test_a_worker_comes_back_behind_the_death_of_the_coordinators_host(launch, reference, tmp_path):
    """Its next process finds the new coordinator, and the new store; its supervisor was killed, too."""
    run = start(launch, tmp_path, "recycle.rejoin=always")
    run.crash("alpha")
    run.hear("lost")
    guard = psutil.Process(run.others["delta"].pid).children()[0]
    next(each for each in guard.children() if each.name() == "recycle-super").kill()
    os.kill(run.pids()[3], signal.SIGKILL)
    run.hear("caught_up")
    result = end(run, tmp_path)
    assert_same_training(result, reference(shape=FOUR), {"0.0", "3.0"})


def test_operators_find_the_next_coordinator(launch, reference, four, tmp_path):
    """A seat leaves and is admitted again behind a takeover, as asked on a host that the coordinator is not on."""
    steps, gates = "steps=150", [held(tmp_path, step, f"go{step}") for step in (10, 30)]
    run = launch(DEADLINE, steps, script=WRAPPED, shape=FOUR, RECYCLE_TEST_WRAP=json.dumps(gates))

    def recycle(*command: str) -> tuple[int, str]:
        on = [*four.entering("gamma"), sys.executable, "-m", "recycle_plugin.cli", *command]
        variables = environment(**{SETTING: str(run.folder / "secret")})
        done = subprocess.run(on, env=variables, capture_output=True, text=True, timeout=120)
        assert not done.stderr
        return done.returncode, done.stdout.strip()

    after_step(run, 4)
    stands_by(run, 1)
    run.crash("alpha")
    (told,) = run.hear("coordinator")
    folder = str(run.folder)
    code, said = recycle("status", folder, "--json")
    known = json.loads(said)
    assert (code, known["state"], known["coordinator"]["host"]) == (0, "running", "beta"), known
    assert recycle("top", folder, "--once")[0] == 0
    assert recycle("leave", "3.0", "--run", folder) == (0, "seat 3.0 (rank 3) leaves at the next commit")
    (tmp_path / "go10").touch()
    run.hear("left")
    assert recycle("admit", "3.0", "--run", folder) == (0, "seat 3.0: its supervisor starts it again")
    run.hear("newcomer")
    address = told["text"].partition("have turned to ")[2].partition(": process")[0]
    code, said = recycle("status", address, "--json")
    assert code == 0 and json.loads(said)["coordinator"]["host"] == "beta", said
    (tmp_path / "go30").touch()
    result = run.finish()
    assert_same_training(result, reference(steps, shape=FOUR), {"0.0"}, left={"3.0"})
    assert [each["seat"] for each in result.of("rejoined")] == ["3.0"]


def test_the_coordinators_host_gets_a_notice_and_goes(launch, reference, tmp_path):
    """Its worker leaves as planned, and nothing is lost once the host is taken away."""
    asks = f"recycle.leave_on='test -e {tmp_path}/notice.$(hostname)'"
    run = start(launch, tmp_path, asks, early=(held(tmp_path, 10, "go10"),))
    (tmp_path / "notice.alpha").touch()
    run.hear("notice")
    (tmp_path / "go10").touch()
    run.hear("left")
    run.crash("alpha")
    run.hear("coordinator")
    result = end(run, tmp_path)
    assert_same_training(result, reference(shape=FOUR), left={"0.0"})


def test_the_host_of_the_one_that_stands_by_dies(launch, reference, tmp_path):
    """Then the coordinator goes on alone, and another one stands by."""
    run = start(launch, tmp_path)
    run.crash("beta")
    stands_by(run, 3)
    result = end(run, tmp_path)
    assert_same_training(result, reference(shape=FOUR), {"1.0"})
    assert not result.of("coordinator")


def test_the_coordinators_process_is_killed_and_nobody_turns_to_another_host(launch, reference, tmp_path):
    run = start(launch, tmp_path)
    host_process(run).kill()
    run.hear("coordinator")
    stands_by(run, 3)
    result = end(run, tmp_path)
    assert_same_training(result, reference(shape=FOUR))
    (told,) = result.of("coordinator")
    assert "was killed by signal 9" in told["text"]


def test_a_coordinators_host_that_is_cut_off_ends_while_the_others_go_on(launch, reference, four, tmp_path):
    """Also where it comes back: its coordinator has half of nothing."""
    run = start(launch, tmp_path)
    four.cut("alpha")
    run.hear("coordinator")
    run.hear("lost")
    assert run.launcher.wait(60) != 0
    four.mend("alpha")
    run.forsake("alpha")
    result = end(run, tmp_path)
    assert_same_training(result, reference(shape=FOUR), {"0.0"})
    assert "fewer than half of the last membership's workers can be reached" in run.said_on("alpha")
    assert "Traceback" not in run.said_on("alpha") + result.output


def test_a_coordinator_that_is_stopped_finds_that_the_others_have_gone_on(launch, reference, tmp_path):
    run = start(launch, tmp_path)
    stopped = host_process(run)
    stopped.suspend()
    run.hear("coordinator")
    stopped.resume()
    stopped.wait(60)
    run.hear("deposed")
    result = end(run, tmp_path)
    assert_same_training(result, reference(shape=FOUR))


def test_live_workers_whose_connections_are_reset_are_not_lost(launch, reference, four, tmp_path):
    """By a kernel that gives them up, or a firewall that forgets them; their supervisors' are, too."""
    run = start(launch, tmp_path)

    def lines(name: str) -> set[tuple[int, int]]:
        return {one for one in four.connections(name) if one[1] == run.port}

    before = {name: lines(name) for name in ("gamma", "delta")}
    for name, mine in before.items():
        try:
            four.reset(name, run.port)
        except NoHosts as error:
            pytest.skip(str(error))
        run.wait_for(lambda: len(lines(name)) == len(mine) and not lines(name) & mine, "connections made again")
    result = end(run, tmp_path)
    assert_same_training(result, reference(shape=FOUR))
    assert not result.of("coordinator")


def test_a_coordinator_that_goes_on_in_time_has_lost_nobody(launch, reference, four, tmp_path):
    """Those who had hung up, and were about to turn to another host, come again."""
    run = start(launch, tmp_path)
    stopped, lines = host_process(run), lambda: {one for one in four.connections("delta") if one[1] == run.port}
    before = lines()
    stopped.suspend()
    run.wait_for(lambda: lines() != before, "a worker that hangs up")
    stopped.resume()
    result = end(run, tmp_path)
    assert_same_training(result, reference(shape=FOUR))
    assert not result.of("coordinator") and not result.of("deposed")


def test_a_line_that_is_cut_for_a_moment_costs_nobody(launch, reference, four, tmp_path):
    """Though who stands by elsewhere takes nothing meanwhile, and nothing goes out."""
    run = start(launch, tmp_path, "recycle.heartbeat_timeout_s=20")
    four.cut("alpha")
    time.sleep(4.0)
    four.mend("alpha")
    result = end(run, tmp_path)
    assert result.code == 0 and not result.of("coordinator") and not result.of("deposed"), result.output[-6000:]
    assert difference(result, reference(shape=FOUR)).tolerated


def test_half_of_the_hosts_are_cut_off_from_the_coordinators_half(launch, reference, four, tmp_path):
    """Which goes on, since nobody can have more than half against it; the others end."""
    run = start(launch, tmp_path)
    four.cut("gamma")
    four.cut("delta")
    run.hear("lost", 2)
    result = end(run, tmp_path)
    assert_same_training(result, reference(shape=FOUR), {"2.0", "3.0"})
    assert all(run.others[name].wait(90) != 0 for name in ("gamma", "delta"))
    assert not result.of("coordinator")


# --- packets that get lost ----------------------------------------------------------------------------


@pytest.mark.plain_too(deepspeed=False)
@pytest.mark.all_kills
@pytest.mark.parametrize("name", ("alpha", "beta"), ids=("the coordinator's", "the standby's"))
def test_a_lossy_line_costs_no_worker_of_another_host(name, launch, reference, four, tmp_path):
    run = start(launch, tmp_path, "recycle.rejoin=never")
    with four.lossy(name, LOSS, DELAY_S, seed=1):
        time.sleep(LOSSY_S)  # how long it lasts
    result = end(run, tmp_path)
    lost = {each["seat"] for each in result.of("lost")}
    assert lost <= {f"{four.names.index(name)}.0"}, result.output[-6000:]
    assert_same_training(result, reference(shape=FOUR), lost)
