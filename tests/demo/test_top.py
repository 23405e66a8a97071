"""``recycle top``: its screen at 2 x 2 and at 32 x 48, from what the coordinator says, and the terminal around it."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recycle_plugin.cli import main
from recycle_plugin.commands import top
from recycle_plugin.core.messages.activity import COMPUTES, WAITS
from recycle_plugin.core.messages.from_workers import Exited, Leaving, Note
from recycle_plugin.observability.event_log import EventLog
from recycle_plugin.observability.report import summary
from recycle_plugin.observability.run_history import RunHistory
from recycle_plugin.observability.run_summary import facts
from recycle_plugin.observability.screen import printed, screen
from recycle_plugin.observability.seats import WORDS, Mark, seat_states
from tests.support.run_folder import LOG
from tests.support.told import ToldJob

CHECKOUT = Path(__file__).parents[2]
LONG_S = 60.0


def killed(rank: int) -> Exited:
    return Exited(rank, -9, 0.0)


def shown(told: ToldJob, columns: int, lines: int, after_s: float = 0.5) -> list[str]:
    history = RunHistory.read(told.write())
    size = os.terminal_size((columns, lines))
    return [printed(line, columns) for line in screen(history, told.now + after_s, size)]


def catching_up(told: ToldJob, seat: str, share: float) -> None:
    details = {"seat": seat, "share": share, "bytes": 4_200_000, "bytes_per_s": 2e6}
    told.say(Note(told.rank(seat), "catching_up", "", details, incarnation=1))


def test_two_by_two(tmp_path):
    told = ToldJob(2, 2, tmp_path)
    told.train(8)
    told.lose("0.1", how=killed)
    told.regroup()
    told.train(4)
    told.come("0.1")
    catching_up(told, "0.1", 0.42)
    assert shown(told, 120, 24) == [
        "running for 12.5 s   goodput 96.0%   last commit 0.5 s ago",
        "step 12   loss 3.800000   8 samples/s, 1.000 s a step   planned: 100% of full throughput",
        "0-9 1 catches up (tenths)   . 3 trains",
        "",
        "seat    rank  host      step  what it does",
        "0.0        0  node0       13  . trains",
        "0.1        1  node0           4 it catches up, for 0 s, with 42% of its stage's state, 4.2 MB at 2.0 MB/s",
        "1.0        2  node0       13  . trains",
        "1.1        3  node0       13  . trains",
    ]


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> ToldJob:
    """32 x 48, of which one leaves, one is silent, one comes back, and two are lost."""
    told = ToldJob(32, 48, tmp_path_factory.mktemp("wide"))
    told.train(6)
    told.lose("0.1", "31.47", "30.24", how=killed)
    told.regroup()
    told.train(2)
    told.come("0.1")
    catching_up(told, "0.1", 0.42)
    told.say(Leaving(told.rank("1.1"), "recycle leave 1.1"))
    told.beat(told.live, COMPUTES, "0F0.0@9")
    for _ in range(4):
        told.now += 0.5
        told.beat([rank for rank in told.live if rank != told.rank("7.9")], WAITS, "what seat 7.9 gives")
    return told


ROWS = {0: "." + "4" + "." * 46, 1: "." + "<" + "." * 46, 7: "." * 9 + "?" + "." * 38}
ROWS |= {30: "." * 24 + "s" + "." * 23, 31: "." * 47 + "s"}


def test_thirty_two_by_forty_eight(wide):
    lines = shown(wide, 80, 50)
    assert lines[2] == "? 1 suspected   0-9 1 catches up (tenths)   s 2 starts again   < 1 leaves"
    assert lines[3] == ". 1531 trains"
    assert lines[5] == "      stage  0         10        20        30        40"
    assert lines[6:38] == [f"replica {replica:>3}  {ROWS.get(replica, '.' * 48)}" for replica in range(32)]
    assert lines[38:40] == ["", "seat    rank  host        step  what it does"]
    seats = [line.split()[0] for line in lines[40:]]
    assert seats == ["7.9", "0.1", "30.24", "31.47", "1.1"] and "345  node43" in lines[40]
    assert all(len(line) <= 80 for line in lines)
    assert [line.split()[0] for line in lines if line.endswith("…")] == ["step", "7.9", "0.1"], "cut"
    summary = dict(facts(RunHistory.read(wide.write())))
    assert summary["hosts"] == "192, of 8 workers each"


@pytest.mark.parametrize("height", range(8, 50))
def test_a_screen_has_no_more_lines_than_the_terminal(wide, height):
    lines = shown(wide, 80, height)
    assert len(lines) <= height
    if height == 24:
        assert [int(line.split()[1]) for line in lines[6:11]] == [*ROWS]
        assert lines[11] == "and 27 replicas more, which all train"


def test_a_grid_is_whole_where_no_list_is_needed(tmp_path):
    told = ToldJob(5, 7, tmp_path)
    told.train(2)
    assert shown(told, 80, 24)[4:] == ["      stage  0", *(f"replica {replica:>3}  {'.' * 7}" for replica in range(5))]


STATES = [
    ([{"event": "suspected", "rank": 2, "text": "seat 0.1 (rank 2): it is late"}], Mark.SUSPECTED, "it is late", 10),
    ([{"event": "suspected", "rank": 2}, {"event": "cleared", "rank": 2}], Mark.TRAINS, "", 10),
    ([{"event": "leaving", "rank": 2, "seat": "0.1", "why": "asked"}], Mark.LEAVES, "asked", 10),
    (
        [{"event": "leaving", "rank": 2, "seat": "0.1", "why": "asked"}, {"event": "left", "rank": 2}],
        Mark.LEFT,
        "asked, 5 s ago",
        None,
    ),
    ([{"event": "lost", "rank": 2, "seat": "0.1", "how": "x", "seen_at": 95.0}], Mark.LOST, "x, 5 s ago", None),
    ([{"event": "restart", "rank": 2}], Mark.STARTS, "its process is started, for 5 s", None),
    ([{"event": "newcomer", "rank": 2}], Mark.RUNS, "its script runs from the top, for 5 s", None),
    (
        [{"event": "newcomer", "rank": 2}, {"event": "behind", "rank": 2, "step": 4, "left": 5}],
        Mark.RUNS,
        "its script runs from the top, for 5 s, at step 4, 5 behind the others",
        4,
    ),
    (
        [{"event": "newcomer", "rank": 2}, {"event": "caught_up", "rank": 2, "bytes": 9, "followed_bytes": 9}],
        Mark.FOLLOWS,
        "it follows the others, and waits to be let in, for 5 s, with 100% of its stage's state, 0.0 MB",
        10,
    ),
    (
        [
            {"event": "newcomer", "rank": 2},
            {"event": "restored", "rank": 2, "seat": "0.1", "step": 3, "bytes": 9, "seconds": 1},
        ],
        Mark.REPLAYS,
        "it replays its stage, which nobody else has, and all others wait, for 5 s",
        None,
    ),
]


@pytest.mark.parametrize("events, mark, text, step", STATES, ids=[str(mark) for _, mark, _, _ in STATES])
def test_what_each_seat_does(tmp_path, events, mark, text, step):
    lines = [json.loads(line) for line in LOG.read_text().splitlines()]
    known = [event for event in lines if event["event"] in ("start", "worker", "resume", "committed")]
    history = RunHistory((*known, *({"time": 105.0, "text": "", **event} for event in events)))
    states = {state.seat: state for state in seat_states(history, 110.0)}
    assert (states["0.1"].mark, states["0.1"].text, states["0.1"].step) == (mark, text, step)
    assert all(state.mark == Mark.TRAINS and state.step == 10 for seat, state in states.items() if seat != "0.1")


def test_each_mark_has_its_words():
    assert [*WORDS] == [*Mark]


def test_of_many_that_are_gone_status_and_the_page_name_some(tmp_path, capsys):
    """A whole replica of 48 stages, and one worker more."""
    told = ToldJob(3, 48, tmp_path)
    told.train(2)
    told.lose("2.5", *(f"1.{stage}" for stage in range(48)), how=killed)
    told.regroup()
    told.train(2)
    for event in map(json.loads, told.lines):
        assert not event["text"].startswith(f"{event['event']}:"), "the console puts the kind before the text"
    main(["status", str(told.write())])
    said = capsys.readouterr().out.splitlines()
    assert "copies     of each stage's state: 1 of stage 5, 2 of all others" in said
    for word, more in (("gone", 25), ("joining", 25)):
        its = [line for line in said if line.startswith(f"{word:<11}")]
        assert len(its) == 25 and its[-1] == f"{word:<11}and {more} more"
    (noticed,) = [line for line in said if line.startswith("noticed")]
    assert noticed.endswith(", and 25 more")
    assert "; and 25 more" in dict(summary(RunHistory.read(tmp_path)))["workers"]


def test_who_waits_for_whom(tmp_path):
    """A stage without anybody, and a job that stands still."""
    told = ToldJob(2, 2, tmp_path)
    told.train(2)
    edges = [{"who": ["0.0", "1.0"], "at": WAITS, "what": "act 0", "whom": ["0.1"], "for_s": 9.0}]
    still = {"event": "wait_graph", "edges": [*edges, {**edges[0], "who": ["1.1"], "at": COMPUTES}]}
    told.now += 1.0
    marks = {state.seat: state for state in seat_states(RunHistory.read(told.write(still)), told.now)}
    assert {seat: state.mark for seat, state in marks.items() if state.mark != Mark.TRAINS} == {
        "0.0": Mark.WAITS,
        "1.0": Mark.WAITS,
    }
    assert marks["0.0"].text == "waits for act 0 of 0.1, for 9 s"
    lost = [
        {"event": "lost", "seat": f"{n}.1", "rank": told.rank(f"{n}.1"), "how": "x", "seen_at": 1.0} for n in (0, 1)
    ]
    marks = {state.seat: state for state in seat_states(RunHistory.read(told.write(*lost)), told.now)}
    assert [state.mark for state in marks.values()] == [Mark.WAITS, Mark.LOST, Mark.WAITS, Mark.LOST]
    assert marks["0.0"].text == "waits for stage 1, which has no worker"
    assert "interrupted for 0.5 s, since seat 1.1 was lost" in printed(
        screen(RunHistory.read(told.folder), told.now + 0.5, os.terminal_size((200, 24)))[0], 200
    )


def test_a_log_is_read_on_as_it_grows(tmp_path):
    """By whatever pieces; a job that is started anew in the folder is another one."""
    first, path = LOG.read_bytes(), tmp_path / "events.jsonl"
    whole = first + first.replace(b'"time": 1', b'"time": 2')
    path.write_bytes(first[: first.index(b'"start"') + 2000])
    log, places = EventLog(tmp_path), [*range(first.index(b'"start"') + 2000, len(whole), 777), len(whole)]
    for before, place in zip(places, places[1:]):
        assert RunHistory(log.events()).events == RunHistory.read(tmp_path).events
        with path.open("ab") as file:
            file.write(whole[before:place])
    found = RunHistory(log.events())
    assert found.events == RunHistory.read(tmp_path).events and found.began == 200.0 and found.last == 9
    with path.open("ab") as file:
        file.write(b'{"time": 300.0, "event": "committed"}\n{"nothing": 1}\n')
    with pytest.raises(ValueError, match=f"line {len(whole.splitlines()) + 2} is no event"):
        RunHistory(log.events())


@pytest.mark.parametrize(
    "last, code",
    [
        (None, 0),
        ({"event": "finished", "text": "all workers have left after step 9"}, 0),
        ({"event": "finished", "text": "the job has ended after step 9: SIGTERM"}, 1),
        ({"event": "end", "text": "the job ends: stage 1 has no live worker left"}, 1),
    ],
)
@pytest.mark.parametrize("command", (["status"], ["top"], ["top", "--once"]), ids=" ".join)
def test_how_the_job_has_ended_is_the_exit_code(folder, command, last, code, capsys):
    lines = [line for line in (folder / "events.jsonl").read_text().splitlines() if '"finished"' not in line]
    lines += [json.dumps({"time": 106.0, "text": "", **last})] if last else []
    (folder / "events.jsonl").write_text("".join(f"{line}\n" for line in lines))
    assert main([*command, str(folder)]) == code
    said = capsys.readouterr().out
    assert "\x1b" not in said and (last or {}).get("text", "") in said
    if command[0] == "top":
        assert (". 3 was there at the end" if last else ". 3 trains") in said


def test_a_job_that_ended_before_its_first_step_is_told_in_a_line(tmp_path, capsys):
    end = {"time": 1.0, "event": "end", "text": "the job ends: rank 1 was killed", "killed": 1}
    (tmp_path / "events.jsonl").write_text(f"{json.dumps(end)}\n")
    for command in ("status", "top"):
        assert main([command, str(tmp_path)]) == 1
        assert "rank 1 was killed" in capsys.readouterr().out


class Terminal:
    """``recycle top`` of a run folder, in a terminal of its own; what it has written is ``text``."""

    def __init__(self, folder: Path) -> None:
        self._ours, theirs = pty.openpty()
        words = [sys.executable, "-m", "recycle_plugin.cli", "top", str(folder)]
        self.process = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, cwd=CHECKOUT)
        os.close(theirs)
        self.text = ""

    def read(self, until: str) -> None:
        """Read until a text comes.  Fails where it does not."""
        ends = time.monotonic() + LONG_S
        while until not in self.text:
            assert select.select([self._ours], [], [], max(0.0, ends - time.monotonic()))[0], self.text
            self.text += os.read(self._ours, 1 << 16).decode()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.fixture
def terminal(folder):
    path = folder / "events.jsonl"
    path.write_text("".join(line for line in path.read_text().splitlines(True) if '"finished"' not in line))
    made = Terminal(folder)
    yield made
    made.close()


def test_it_ends_with_the_job_and_the_terminal_is_as_before(folder, terminal):
    terminal.read(top.END_OF_SCREEN)
    assert terminal.text.startswith(top.BEGIN) and "goodput" in terminal.text
    with (folder / "events.jsonl").open("a") as log:
        log.write(json.dumps({"time": 105.0, "event": "finished", "text": "all workers have left after step 9"}) + "\n")
    terminal.read("20 samples/s (58%).")
    assert terminal.process.wait(LONG_S) == 0
    last = terminal.text.partition(top.LEAVE)[2]
    assert re.sub(r"\s+", " ", last).startswith("The job trained 9 steps in 4.35 s and came to its planned end; 1 of 4")


def test_ctrl_c_restores_the_terminal(terminal):
    terminal.read(top.END_OF_SCREEN)
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.process.wait(LONG_S) == 130
    terminal.read(top.LEAVE)
    assert "Traceback" not in terminal.text
