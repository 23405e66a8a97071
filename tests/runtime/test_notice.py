"""How a worker asks whether its host is about to be taken away."""

from __future__ import annotations

import time

import psutil
import pytest

from recycle_plugin.runtime.control import notice


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        ("true", None),
        ("test -e {there}", None),
        ("echo TRUE | grep -q TRUE", None),
        ("test -e {there}.not", ""),
        ("exit 22", ""),
        ("recycle-no-such-command", "the shell can't run it (exit code 127)"),
        ("{there}", "the shell can't run it (exit code 126)"),
    ],
)
def test_only_a_command_that_succeeds_is_a_notice(command, answer, tmp_path):
    there = tmp_path / "there"
    there.touch()
    assert notice._asked(command.format(there=there)) == answer


def test_a_command_that_does_not_end_is_none_and_is_ended_with_all_that_it_has_started(monkeypatch, tmp_path):
    monkeypatch.setattr(notice, "ANSWER_S", 2.0)
    assert notice._asked(f"sleep 60 & echo $! > {tmp_path}/pid; sleep 60; true") == "no answer within 2 s"
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "what the shell has started goes on"
        time.sleep(0.01)


def test_a_command_that_may_not_be_killed_is_no_answer_either(monkeypatch, tmp_path):
    """It runs as another user, as sudo does; the thread that asks goes on."""
    kill = notice.os.killpg

    def refuse(group: int, number: int) -> None:
        groups.append(group)
        raise PermissionError(1, "Operation not permitted")

    groups: list[int] = []
    monkeypatch.setattr(notice, "ANSWER_S", 0.2)
    monkeypatch.setattr(notice, "KILLED_S", 0.1, raising=False)
    monkeypatch.setattr(notice.os, "killpg", refuse)
    assert notice._asked("sleep 60") == "no answer within 0 s"
    kill(groups[0], 9)
