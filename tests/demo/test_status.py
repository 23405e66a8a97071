"""``recycle status`` on the hand-written run, and whatever it shares with ``recycle report``."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from recycle_plugin.authentication.secret import SETTING
from recycle_plugin.cli import main
from recycle_plugin.commands.status import lines, status
from recycle_plugin.launch import free_port
from recycle_plugin.observability import report
from recycle_plugin.observability.comings import OVER, comings
from recycle_plugin.observability.event_log import EVENTS
from recycle_plugin.observability.run_history import RunHistory, place
from recycle_plugin.observability.run_summary import sentence
from recycle_plugin.observability.training_time import goodput
from tests.support.run_folder import WHY, Read, rewrite


def test_status(folder, capsys):
    assert main(["status", str(folder)]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()[1:])
    assert lines["step"] == "9, loss 4.100000" and lines["workers"] == "3 of 4" and lines["checkpoint"] == "none"
    assert lines["gone"].startswith("seat 0.1 (rank 2), ") and lines["gone"].endswith(f" s ago: {WHY}")
    assert lines["now"] == "20 samples/s, 0.400 s a step" and lines["before"] == "34.78 samples/s, 0.230 s a step"
    assert lines["predicted"] == "60% of the throughput with all workers, 0.383 s a step"
    assert lines["live"] == "0.0, 1.0, 1.1" and lines["copies"] == "of each stage's state: 2, 1"
    assert "joining" not in lines


def test_status_as_data(folder, capsys):
    more = [
        {"event": "checkpoint", "text": "", "path": "saved/global_step9"},
    ]
    lines = [line for line in (folder / "events.jsonl").read_text().splitlines() if '"finished"' not in line]
    (folder / "events.jsonl").write_text(
        "\n".join([*lines, *(json.dumps({"time": 104.6} | one) for one in more)]) + "\n"
    )
    assert main(["status", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["end"], found["step"], found["workers"]) == ("running", None, 9, {"live": 3, "of": 4})
    assert found["step_s"] == {"now": 0.4, "before": 0.23, "predicted": 0.3833}
    assert found["samples_per_s"] == {
        "now": 20.0,
        "before": 34.7826,
    }
    assert found["checkpoint"] == "saved/global_step9"


def test_steps_without_a_replica_count_the_samples_that_they_had(folder):
    """0.1 has no peers that take its work: what is left of the batch of 8 is 4 samples, in steps of 0.4 s."""

    def shrunk(events: list[dict]) -> list[dict]:
        gone = {"contributed": [1], "replicas": 2}
        return [event | gone if event["event"] == "committed" and event["step"] > 5 else event for event in events]

    usual, less = RunHistory.read(folder), rewrite(folder, shrunk)
    assert status(usual, 200.0)["samples_per_s"] == {"now": 20.0, "before": 34.7826}
    assert status(less, 200.0)["samples_per_s"] == {"now": 10.0, "before": 34.7826}
    assert goodput(less, 104.6) == pytest.approx(goodput(usual, 104.6) * (5 * 8 + 4 * 4) / (9 * 8))
    with pytest.raises(ValueError, match="has '0' as replicas"):
        rewrite(folder, lambda events: [event | ({"replicas": 0} if "replicas" in event else {}) for event in events])


def test_ranks_are_counted_where_several_hold_a_seat(folder):
    others = {seat: [rank] for rank, seat in enumerate(("0.0", "1.0", "0.1", "1.1"), 4)}
    assert without_end(folder, others=others)["workers"] == "6 of 8"
    assert "1 of 4 seats of 2 ranks each was lost" in sentence(RunHistory.read(folder))
    assert dict(report.summary(RunHistory.read(folder)))["workers"].startswith("6 of 8 left")


def test_a_folder_in_the_place_of_the_log_is_one_line(tmp_path, capsys):
    (tmp_path / EVENTS).mkdir()
    assert main(["status", str(tmp_path)]) == 2
    assert "has no events.jsonl" in (said := capsys.readouterr().err) and said.count("\n") == 1


BACK = (
    ({"event": "restart"}, "its process is started, for 95 s"),
    ({"event": "worker", "pid": 9, "incarnation": 1}, "its process is started, for 95 s"),
    ({"event": "newcomer"}, "its script runs from the top, for 95 s"),
    (
        {"event": "catching_up", "share": 0.25, "bytes": 4_000_000, "bytes_per_s": 2e6},
        "it catches up, for 95 s, with 25% of its stage's state, 4.0 MB at 2.0 MB/s",
    ),
    (
        {"event": "catching_up", "share": 0.5, "bytes": 8_000_000, "bytes_per_s": 4e6, "time": 105.0},
        "it catches up, for 95 s, with 50% of its stage's state, 8.0 MB at 4.0 MB/s",
    ),
    (
        {"event": "caught_up", "bytes": 16_000_000, "followed_bytes": 9},
        "it follows the others, and waits to be let in, for 95 s, with 100% of its stage's state, 16.0 MB",
    ),
)


@pytest.mark.parametrize("count", range(1, len(BACK) + 1))
def test_status_says_how_far_those_have_come_who_come_back(folder, count):
    joining = without_end(folder, *({"rank": 2} | event for event, _ in BACK[:count]))["joining"]
    assert joining == f"seat 0.1 (rank 2): {BACK[count - 1][1]}"


REPLAY = (
    (
        {"event": "restored", "seat": "0.1", "step": 3, "bytes": 9, "seconds": 0.1},
        "it replays its stage, which nobody else has, and all others wait, for 95 s",
    ),
    (
        {"event": "replayed", "seat": "0.1", "step": 9, "steps": 6, "bytes": 9},
        "it has replayed its stage, for 95 s",
    ),
)


@pytest.mark.parametrize("count", (1, 2))
def test_status_says_that_somebody_replays_a_stage(folder, count):
    told = [event for event, _ in (*BACK[:3], *REPLAY[:count])]
    joining = without_end(folder, *({"rank": 2} | event for event in told))["joining"]
    assert joining == f"seat 0.1 (rank 2): {REPLAY[count - 1][1]}"


@pytest.mark.parametrize("kind", OVER)
def test_nobody_is_coming_who_is_there_or_was_given_up(kind):
    events = [{"time": 1.0, "rank": 2} | event for event, _ in BACK]
    assert [one.rank for one in comings(events)] == [2]
    assert comings([*events, {"event": kind, "rank": 2, "time": 2.0}]) == []
    assert [one.rank for one in comings([*events, {"event": kind, "rank": 1, "time": 2.0}])] == [2]


@pytest.mark.parametrize("command", (["status"], ["top", "--once"], ["leave", "1.1", "--run"]), ids=" ".join)
def test_an_address_where_nothing_listens_is_told_in_one_line(command, capsys):
    for port, why in ((free_port(), "nothing listens"), (99999, "ports go from 1 to 65535")):
        address = f"127.0.0.1:{port}"
        assert main([*command, address]) == 2
        assert capsys.readouterr().err == f"recycle: {address} is no run folder, and no job answers there: {why}\n"


def test_a_listener_without_a_secret_here_is_told_at_once(capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert main(["status", f"127.0.0.1:{port}"]) == 2
    said = capsys.readouterr().err
    assert "no job answers there: a process listens, but its job's secret is not at /" in said and said.count("\n") == 1


def test_a_listener_that_is_no_coordinator_is_told_in_one_line(tmp_path, capsys, monkeypatch):
    secret = tmp_path / "secret"
    secret.write_text("s" * 64)
    secret.chmod(0o600)
    monkeypatch.setenv(SETTING, str(secret))
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with listener.accept()[0] as caller:
                caller.recv(1)
                caller.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n" * 9)

        threading.Thread(target=answer, daemon=True).start()
        assert main(["status", f"127.0.0.1:{listener.getsockname()[1]}"]) == 2
    said = capsys.readouterr().err
    assert "answers, but is no coordinator of this job" in said and said.count("\n") == 1


def test_status_says_where_metrics_are_while_the_job_runs(folder):
    url = "http://127.0.0.1:9400/metrics"
    assert without_end(folder, {"event": "metrics", "url": url})["metrics"] == url
    assert "metrics" not in without_end(
        folder, {"event": "metrics", "url": url}, {"event": "finished", "text": "all have left"}
    )


def without_end(folder: Path, *more: dict, **start: object) -> dict[str, str]:
    """``recycle status`` of that run before its end, with ``more`` events and another ``start``, by the word that each
    line begins with.
    """
    events = [
        json.loads(line)
        for line in (folder / "events.jsonl").read_text().splitlines()
        if '"finished"' not in line and '"left"' not in line
    ]
    next(event for event in events if event["event"] == "start").update(start)
    (folder / "events.jsonl").write_text(
        "".join(f"{json.dumps(event)}\n" for event in [*events, *({"time": 104.6, "text": ""} | one for one in more)])
    )
    known = status(RunHistory.read(folder), 200.0)
    assert json.loads(json.dumps(known)) == known
    return dict(lines(known))


def test_nothing_is_predicted_where_a_stage_is_gone_nor_before_there_is_a_plan(folder):
    one = {"event": "lost", "seat": "0.0", "rank": 0, "how": "its connection broke", "seen_at": 104.6}
    assert without_end(folder, one)["predicted"] == "not known yet"
    assert (
        without_end(folder, {**one, "seat": "1.1", "rank": 3})["predicted"] == "nothing: no worker is left in stage 1"
    )
    assert "predicted 0%" not in (text := report.write(folder).read_text()) and "predicted None" not in text


def test_a_job_whose_coordinator_was_killed_runs_no_more(folder):
    ended = subprocess.Popen(["true"])
    ended.wait()
    here = {"host": "h", "stop": 7, "place": place()}
    killed = f"killed: the coordinator's process on host h, {ended.pid}, is gone, and has not said why"
    assert without_end(folder, coordinator=here | {"pid": ended.pid})["state"] == killed
    assert killed in Read(report.write(folder).read_text()).texts["td"]
    assert without_end(folder, coordinator=here | {"pid": os.getpid()})["state"].startswith("killed"), (
        "the log is of 1970, and this process is not"
    )
    running = without_end(folder, coordinator=here | {"pid": os.getpid()}, time=time.time())
    assert running["state"].startswith("running")
    assert running["to stop it"] == "kill 7 on host h (ends the job at a commit)"
    assert without_end(folder, coordinator={"host": "h", "stop": 7, "place": "elsewhere", "pid": ended.pid})[
        "state"
    ].startswith("running")


def test_who_has_taken_over_may_have_been_started_long_after_the_job(folder):
    here = {"host": "h", "pid": os.getpid(), "stop": 7, "place": place()}
    taken_over = {"event": "coordinator", "coordinator": here, "time": time.time()}
    assert without_end(folder, taken_over, coordinator=here)["state"].startswith("running"), "the log begins in 1970"


def test_a_coordinator_that_was_deposed_has_ended_the_job_unless_another_host_goes_on(folder):
    here = {"host": "h", "pid": 7, "stop": 7, "place": "elsewhere"}
    deposed = {"event": "deposed", "text": "not half can be reached", "host": "h", "term": 2}
    assert "not half can be reached" in without_end(folder, deposed, coordinator=here)["state"]
    gone_on = {"event": "coordinator", "coordinator": here | {"host": "another"}}
    assert without_end(folder, gone_on, deposed, coordinator=here)["state"].startswith("running")


WRONG = {
    "missing": (None, "nowhere is no folder: name a run folder"),
    "empty": ("", "has no job: its start event is missing"),
    "broken": ('{"time": 1}\n', "events.jsonl, line 1 is no event: "),
    "other": ("[1]\n", "events.jsonl, line 1 is no event: [1]"),
}


@pytest.mark.parametrize("command", ("status", "report"))
@pytest.mark.parametrize("text, message", WRONG.values(), ids=WRONG)
def test_a_bad_folder_is_one_line(tmp_path, capsys, command, text, message):
    folder = tmp_path / ("nowhere" if text is None else "run")
    if text is not None:
        folder.mkdir()
        (folder / "events.jsonl").write_text(text)
    assert main([command, str(folder)]) == 2
    said = capsys.readouterr()
    assert message in said.err and said.err.count("\n") == 1 and not said.out
    assert not (folder / "report.html").exists()


def test_a_line_that_is_being_written_is_left_out(folder):
    with (folder / "events.jsonl").open("a") as log:
        log.write('{"time": 105.0, "event": "war')
    assert RunHistory.read(folder).events[-1]["event"] == "finished"


def without(kind: str, field: str) -> Callable[[list[dict]], list[dict]]:
    def changed(events: list[dict]) -> list[dict]:
        inside = [event["job"] if field.startswith("job.") else event for event in events if event["event"] == kind]
        inside[0].pop(field.removeprefix("job."))
        return events

    return changed


def having(kind: str, **fields: object) -> Callable[[list[dict]], list[dict]]:
    def changed(events: list[dict]) -> list[dict]:
        return [{**event, **fields} if event["event"] == kind else event for event in events]

    return changed


ODD = {
    "no batch": (without("start", "job.batch"), "its start event has no job.batch: it was written by another release"),
    "no job": (without("start", "job"), "its start event has no job.replicas: it was "),
    "no seats": (without("start", "seats"), "its start event has no seats: it was "),
    "no step": (without("committed", "step"), "its committed event has no step: it was "),
    "no rank": (without("lost", "rank"), "its lost event has no rank: it was "),
    "no text": (without("finished", "text"), "its finished event has no text: it was "),
    "time": (having("committed", time="soon"), "its committed event has 'soon' as time: it was "),
    "late": (having("committed", time=1e300), "its committed event has '1e+300' as time: it was "),
    "nan": (having("resume", throughput=float("nan")), "its resume event has 'nan' as throughput: it was "),
    "steps": (having("committed", step=10**400), "its committed event has '1000000000"),
    "seat": (having("lost", seat="9.9"), "its lost event names seat 9.9, which is not in its start event"),
    "left": (having("left", rank=9), "its left event names rank 9, which is not in its start event"),
    "coordinator": (having("start", coordinator={"host": "h"}), "its start event has no coordinator.pid: it was "),
}


@pytest.mark.parametrize("command", ("status", "report"))
@pytest.mark.parametrize("change, message", ODD.values(), ids=ODD)
def test_a_log_that_lacks_something_is_one_line_with_its_path(folder, capsys, command, change, message):
    path = folder / EVENTS
    events = change([json.loads(line) for line in path.read_text().splitlines()])
    path.write_text("".join(f"{json.dumps(event)}\n" for event in events))
    assert main([command, str(folder)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"recycle: {path}: {message}") and said.count("\n") == 1


def test_status_as_data_has_no_number_that_json_has_not(folder, capsys):
    for loss in ("NaN", "Infinity", "null"):
        with (folder / EVENTS).open("a") as log:
            log.write(f'{{"time": 105, "event": "loss", "text": "", "step": 9, "loss": {loss}}}\n')
        assert main(["status", str(folder), "--json"]) == 0
        assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["loss"] is None


def test_what_is_no_text_names_its_file_and_line(folder, capsys):
    path = folder / EVENTS
    path.write_bytes(path.read_bytes() + b"\xff\xfe\n")
    assert main(["status", str(folder)]) == 2
    assert f"recycle: {path}, line {len(path.read_bytes().splitlines())} is no event: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("0.0.txt", b"0F0.0@1 1 2\n0F0.0@1 1\n", ", line 2 is no span: 0F0.0@1 1"),
        ("0.0.txt", b"\xff 1 2\n", ", line 1 is no span: "),
        ("notes.txt", b"mine\n", " is no worker's trace: its name is no seat's"),
    ],
)
def test_a_stray_trace_names_its_file(folder, capsys, name, text, message):
    (folder / "trace").mkdir()
    (folder / "trace" / name).write_bytes(text)
    assert main(["report", str(folder)]) == 2
    assert f"recycle: {folder / 'trace' / name}{message}" in capsys.readouterr().err
