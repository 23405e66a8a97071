"""The folders that a job writes to are its own, as long as its coordinator's process lives."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from recycle_plugin.runtime.control.claims import LOCK, Claims
from tests.support.membership import job

HOLD = """
import sys
from dataclasses import replace
from recycle_plugin.runtime.control.claims import Claims
from tests.support.membership import job
claims = Claims(print)
print(repr(claims.take(replace(job(), run_dir=sys.argv[1], folders=eval(sys.argv[2])), "first")), flush=True)
sys.stdin.read()
claims.release()
"""


def taken(folder: Path, *folders: tuple[str, str]) -> str:
    """What another job hears that asks for these."""
    warned: list[str] = []
    claims = Claims(warned.append)
    why = claims.take(replace(job(), run_dir=str(folder), folders=folders), "second")
    claims.release()
    assert not warned
    return why


@pytest.fixture
def hold():
    """``hold(run_dir, *folders)`` is another process that has claimed these."""
    processes = []

    def start(folder: Path, *folders: tuple[str, str]) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(folder), repr(folders)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        assert process.stdout.readline() == "''\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("way", ("through another name", "as a folder of checkpoints"))
def test_a_second_job_is_refused_and_hears_who_has_the_folder(hold, tmp_path, way):
    ours, setting = tmp_path / "ours", "run_dir"
    if way == "through another name":
        first = hold(tmp_path / "run")
        ours.symlink_to(tmp_path / "run")
        why = taken(ours)
    else:
        first, setting = hold(tmp_path / "run", ("checkpoint_dir", str(ours))), "checkpoint_dir"
        why = taken(tmp_path / "other", ("checkpoint_dir", str(ours)))
    assert re.fullmatch(
        rf"recycle.{setting}: {ours} is the folder of job first, process {first.pid} on host \S+, which runs: set "
        "it to another folder, or wait until that job has ended",
        why,
    )


@pytest.mark.parametrize("end", ("kill", "release"))
def test_a_job_that_has_ended_holds_nothing(hold, tmp_path, end):
    first = hold(tmp_path)
    if end == "kill":
        os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    assert taken(tmp_path) == ""
    assert not (tmp_path / LOCK).exists()


def test_one_job_may_have_one_folder_for_several_things(tmp_path):
    assert taken(tmp_path, ("checkpoint_dir", str(tmp_path)), ("log.folder", f"{tmp_path}/../{tmp_path.name}")) == ""


@pytest.mark.parametrize("folder, why", [("/proc/x", "No such file or directory"), ("file", "File exists")])
def test_a_folder_that_cannot_be_made_is_refused(tmp_path, folder, why):
    (tmp_path / "file").touch()
    path = tmp_path / folder
    assert taken(path) == (f"recycle.run_dir: the folder {path} can't be made or written to ({why}): set another one")


@pytest.mark.parametrize("number", (errno.ENOLCK, errno.ENOSPC))
def test_where_there_are_no_locks_or_the_disk_is_full_it_says_so_and_goes_on(tmp_path, monkeypatch, number):
    """The file system is played: none here is without locks."""

    def refuse(descriptor: int, how: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    warned: list[str] = []
    assert Claims(warned.append).take(replace(job(), run_dir=str(tmp_path)), "second") == ""
    assert warned == [
        f"recycle.run_dir: the folder {tmp_path} can't be locked ({os.strerror(number)}): make sure that no other job "
        "uses it"
    ]


def test_who_takes_a_jobs_place_leaves_no_lock_of_the_one_before(tmp_path):
    """That is still there as the other one begins, and is gone once the job ends."""
    before, after = Claims(print), Claims(print)
    given = replace(job(), run_dir=str(tmp_path))
    assert before.take(given, "the job") == after.take(given, "the job") == ""
    for descriptor in before._held.values():  # as its process's end does
        os.close(descriptor)
    after.release()
    assert not (tmp_path / LOCK).exists()


def test_a_lock_that_its_owner_removes_meanwhile_is_made_again(tmp_path, monkeypatch):
    """The moment is played: the other job ends after this one has opened and locked its file, and seen it there."""
    there, removed = Path.exists, []

    def look(path: Path, **more: bool) -> bool:
        found = there(path, **more)
        if path.name == LOCK and not removed:
            removed.append(path.unlink())
        return found

    monkeypatch.setattr(Path, "exists", look)
    assert taken(tmp_path) == ""


def test_the_lock_of_a_job_that_has_come_since_stays(tmp_path):
    """Somebody has removed the first one's, and the second job has made its own."""
    first, second = Claims(print), Claims(print)
    assert first.claim("run_dir", tmp_path) == ""
    (tmp_path / LOCK).unlink()
    assert second.claim("run_dir", tmp_path) == ""
    first.release()
    assert (tmp_path / LOCK).exists()
    second.release()
    assert not (tmp_path / LOCK).exists()
