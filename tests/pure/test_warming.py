"""Processes that start together wait for the one that compiles, but not for ever."""

from __future__ import annotations

import errno
import fcntl

import pytest

from recycle_plugin.planner import warming


@pytest.fixture
def ran(monkeypatch, tmp_path):
    """How often the planner's loops were run; the lock is in the test's folder."""
    times: list[float] = []
    monkeypatch.setattr(warming, "_lock_file", lambda: tmp_path / "lock")
    monkeypatch.setattr(warming, "_run", lambda: times.append(warming.time.monotonic()))
    return times


def test_who_waits_too_long_for_another_compiles_without_the_lock(ran, monkeypatch, tmp_path):
    now = [0.0]
    monkeypatch.setattr(warming.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(warming.time, "sleep", lambda seconds: now.append(now.pop() + 30))
    with open(tmp_path / "lock", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        warming.warm()
    assert ran == [warming.LOCK_S]


def test_who_waits_loads_once_the_other_has_compiled(ran, monkeypatch, tmp_path):
    with open(tmp_path / "lock", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        monkeypatch.setattr(warming.time, "sleep", lambda seconds: fcntl.flock(other, fcntl.LOCK_SH))
        warming.warm()
    assert len(ran) == 1


def test_a_file_system_without_locks_holds_nobody_up(ran, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    warming.warm()
    assert len(ran) == 1
