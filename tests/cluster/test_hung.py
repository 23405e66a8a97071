"""Workers that are stopped or stuck are given up, and training goes on as if they had died; slow ones are not."""

from __future__ import annotations

import ctypes
import json
import re

import psutil
import pytest

from tests.support.jobs import STEPS, WRAPPED, after_step, assert_same_training, faults, held

SOON = "recycle.progress_timeout_s=2"
PTRACE_SEIZE, PTRACE_DETACH, PTRACE_O_TRACEEXIT = 0x4206, 17, 0x40


@pytest.mark.plain_too
@pytest.mark.some_of(2)
@pytest.mark.parametrize(
    "fault",
    ("stop 0.1 before 1F0.1@6", "stop 1.0 after 0REDUCE@6", "stop 0.0 before 0STEP@6", "stop 1.1 after 1I1.0@6"),
)
def test_a_stopped_worker_is_given_up(launch, reference, fault):
    """Its supervisor kills it: at the end of every test nothing is left."""
    result = launch(SOON, faults(fault)).finish()
    assert_same_training(result, reference(), {fault.split()[1]})
    (lost,), (confirmed,), (suspected,) = result.of("lost"), result.of("confirmed"), result.of("suspected")
    assert "its process is stopped for" in lost["how"] and confirmed["code"] == -9 and suspected["seat"] == lost["seat"]


@pytest.mark.plain_too(deepspeed=False)
def test_a_worker_that_stops_while_it_recovers(launch, reference):
    result = launch(SOON, faults("kill 0.1 before 1F0.1@6", "stop 1.0 at recovery.report:2")).finish()
    assert_same_training(result, reference(), {"0.1", "1.0"})


@pytest.mark.plain_too(deepspeed=False)
@pytest.mark.parametrize("fault", ("stop 0.1 before 1F0.1@6", "stop 0.1 before 1REDUCE@6"))
def test_a_worker_that_wakes_up_later_changes_nothing_and_ends(launch, reference, fault):
    """Its supervisor fails to kill it, and wakes it up instead."""
    result = launch(SOON, faults(fault), plugin="tests.jobs.unfenced").finish()
    assert_same_training(result, reference(), {"0.1"})
    (confirmed,) = result.of("confirmed")
    assert confirmed["code"] == 3 and result.output.count("was given up (its process is stopped for") == 1


@pytest.mark.all_kills
@pytest.mark.real_launcher
@pytest.mark.parametrize("killed", [True, False], ids=["killed", "woken up"])
def test_a_worker_that_is_stopped_for_30_s_with_the_default_deadlines(launch, reference, tmp_path, killed):
    """The others go on after 20 s; woken up 7 s later, while they still train, it ends without having changed
    anything.
    """
    hold = {"name": "gate", "folder": str(tmp_path), "before": f"0F0.0@{STEPS - 2}", "until": "", "by": ["confirmed"]}
    plugin = "recycle_plugin.launch" if killed else "tests.jobs.unfenced"
    run = launch(
        faults("stop 1.1 before 1I1.0@6"),
        plugin=plugin,
        script=WRAPPED,
        RECYCLE_TEST_WRAP=json.dumps(hold),
        RECYCLE_TEST_ASLEEP_S="27",
    )
    after_step(run, STEPS - 4)
    run.hear("confirmed")
    (tmp_path / "confirmed").touch()
    result = run.finish()
    assert_same_training(result, reference(), {"1.1"})
    (fault,), (lost,), (confirmed,) = result.of("fault"), result.of("lost"), result.of("confirmed")
    print(
        f"stopped at {fault['struck_at']:.3f}, lost after {lost['time'] - fault['struck_at']:.2f} s, ended after "
        f"{confirmed['time'] - fault['struck_at']:.2f} s"
    )
    assert "its process is stopped for 20." in lost["how"] and confirmed["code"] == (-9 if killed else 3)
    assert killed or confirmed["time"] > fault["struck_at"] + 30


@pytest.mark.plain_too(deepspeed=False)
def test_nobody_waits_until_a_killed_worker_has_given_its_memory_back(launch, reference, tmp_path):
    """As one with much memory, it stays at the beginning of its end, with its memory and its connections."""
    wrap = json.dumps([held(tmp_path, 4, "traced"), held(tmp_path, STEPS - 2, "released")])
    run = launch(faults("kill 0.1 before 1F0.1@6"), script=WRAPPED, RECYCLE_TEST_WRAP=wrap)
    after_step(run, 2)
    pid = run.pid_of("0.1")
    if trace(PTRACE_SEIZE, pid, PTRACE_O_TRACEEXIT):
        pytest.skip("no process may trace another one here")
    (tmp_path / "traced").touch()
    after_step(run, 7)
    process = psutil.Process(pid)
    assert process.memory_info().rss > 0 and process.net_connections("tcp") and not run.of("confirmed")
    trace(PTRACE_DETACH, pid, 0)
    run.hear("confirmed")
    (tmp_path / "released").touch()
    result = run.finish()
    assert_same_training(result, reference(), {"0.1"})
    (lost,), (confirmed,) = result.of("lost"), result.of("confirmed")
    assert lost["how"] == "its process is ending" and lost["cause"] == "died" and confirmed["code"] == -9


def trace(request: int, pid: int, data: int) -> int:
    """As ptrace(2) of this process's main thread; not 0 if it fails."""
    return ctypes.CDLL(None).ptrace(request, pid, None, ctypes.c_void_p(data))


@pytest.mark.plain_too(deepspeed=False)
def test_a_worker_that_is_stuck_in_an_instruction_is_given_up(launch, reference):
    wrap = json.dumps({"name": "linger", "seat": "1.1", "seconds": 1000, "step": 6, "only": "1I1.0@6"})
    result = launch(SOON, script=WRAPPED, RECYCLE_TEST_WRAP=wrap).finish()
    assert_same_training(result, reference(), {"1.1"})
    (lost,) = result.of("lost")
    assert "it computes 1I1.0@6 for" in lost["how"]


@pytest.mark.plain_too(deepspeed=False)
def test_a_long_step_of_many_instructions_is_progress_and_who_waits_for_it_is_not_to_blame(launch, reference):
    """Each instruction takes half of the deadline, the step three times as long."""
    wrap = json.dumps({"name": "linger", "seat": "0.0", "seconds": 1.0, "step": 6})
    result = launch(SOON, script=WRAPPED, RECYCLE_TEST_WRAP=wrap).finish()
    assert_same_training(result, reference())


@pytest.mark.plain_too(deepspeed=False)
def test_work_that_takes_long_costs_one_worker_at_most_and_none_where_it_computes(launch, reference):
    """Whoever does it: in step 5 a micro-batch computes for two deadlines; in step 8 one sleeps that long, by which the
    first cannot be told from one that hangs.
    """
    computes = {"name": "linger", "seat": "", "seconds": 2.5, "step": 5, "only": "0F0.0@5", "computes": True}
    sleeps = {"name": "linger", "seat": "", "seconds": 2.5, "step": 8, "only": "1F1.1@8"}
    deadlines = "recycle.progress_timeout_s=1", "recycle.busy_timeout_s=6"
    result = launch(*deadlines, script=WRAPPED, RECYCLE_TEST_WRAP=json.dumps([computes, sleeps])).finish()
    assert_same_training(result, reference(), {"1.1"})
    (lost,) = result.of("lost")
    assert re.search(r"it computes 1F1\.1@8 for .*, its process using 1?\d% of a core", lost["how"]), lost
    assert list(dict.fromkeys(event["seat"] for event in result.of("suspected")))[:2] == ["0.0", "1.1"]
    assert result.of("cleared")[0]["seat"] == "0.0"


@pytest.mark.plain_too(deepspeed=False)
def test_where_everybody_waits_all_meet_again_and_what_was_lost_is_sent_once_more(launch, reference):
    wrap = json.dumps({"name": "swallow", "seat": "0.0", "only": "0SA0.1>0.1@6", "times": 1})
    result = launch("recycle.progress_timeout_s=1", script=WRAPPED, RECYCLE_TEST_WRAP=wrap).finish()
    assert_same_training(result, reference())
    (said,) = [event["text"] for event in result.of("warning") if event["text"].startswith("all workers have waited")]
    assert "seat 0.1 (rank 2) waits for act of stage 0, micro-batch 0.1, step 6 from seat 0.0 for" in said, said


@pytest.mark.plain_too(deepspeed=False)
def test_where_that_does_not_help_the_job_ends_with_who_waits_for_whom(launch):
    wrap = json.dumps({"name": "swallow", "seat": "0.0", "only": "0SA0.1>0.1@6", "times": 99})
    result = launch("recycle.progress_timeout_s=1", script=WRAPPED, RECYCLE_TEST_WRAP=wrap).finish()
    assert result.code != 0 and not result.of("lost"), result.output[-6000:]
    (end,) = result.of("end")
    assert "once more since step 5 was committed" in end["text"] and len(result.of("wait_graph")) == 2
    edges = {tuple(edge["who"]): edge["whom"] for edge in result.of("wait_graph")[-1]["edges"]}
    assert edges["0.1",] == ["0.0"] and not any("0.1" in who for who in edges if who != ("0.1",)), edges


@pytest.mark.plain_too(deepspeed=False)
def test_a_script_that_ends_before_the_others_ends_the_job_with_a_code(launch):
    result = launch(
        script=WRAPPED, RECYCLE_TEST_WRAP=json.dumps({"name": "stop_after", "seat": "0.0", "step": 4})
    ).finish()
    assert result.code != 0, result.output[-6000:]
    (end,) = result.of("end")
    assert "the training script of seat 0.0 (rank 0) ended after step 4, and that of seat" in end["text"]
    assert "is in step 5: all scripts have to train the same number of steps" in end["text"]
