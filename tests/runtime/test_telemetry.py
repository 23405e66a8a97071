"""What can't be written is dropped, said once, and comes back whole lines at a time."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys

import pytest

from recycle_plugin import folders
from recycle_plugin.core.messages.from_workers import Note
from recycle_plugin.errors import NotSaved, RecycleError
from recycle_plugin.observability import telemetry
from recycle_plugin.observability.telemetry import UNWRITTEN, WRITTEN, Droppable, LineFile


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def say(said, monkeypatch):
    monkeypatch.setattr(telemetry, "RETRY_S", 0.0)

    def taken(kind: str, text: str, **details: str) -> None:
        assert Note(0, kind, text, details).is_known, "the coordinator takes it of a worker"
        said.append(kind)

    return taken


def test_lines_are_dropped_while_the_disk_is_full_and_what_is_kept_comes_later(tmp_path, said, say):
    path = tmp_path / "folder" / "lines.txt"
    path.parent.mkdir()
    path.symlink_to("/dev/full")
    lines = LineFile(path, say)
    for number in range(6):
        if number == 4:
            path.unlink()
        lines.add(f"line {number}", keep=number in (0, 2))
    lines.close()
    assert path.read_text().splitlines() == ["line 0", "line 2", "line 4", "line 5"]
    assert said == [UNWRITTEN, WRITTEN]


def test_a_folder_that_goes_and_comes_back(tmp_path, said, say):
    folder = tmp_path / "run"
    folder.write_text("no folder")
    lines = LineFile(folder / "lines.txt", say)
    lines.add("one")
    folder.unlink()
    lines.add("two")
    lines.close()
    assert (folder / "lines.txt").read_text() == "two\n" and said == [UNWRITTEN, WRITTEN]


def test_no_part_of_a_line_stays_where_the_room_ends_in_it(tmp_path, said, say):
    path, before = tmp_path / "lines.txt", resource.getrlimit(resource.RLIMIT_FSIZE)
    lines = LineFile(path, say)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (25, before[1]))
        for number in range(5):
            lines.add(f"number {number}")  # of 9 bytes: two fit
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    lines.add("the last")
    lines.close()
    assert path.read_text().splitlines() == ["number 0", "number 1", "the last"] and said == [UNWRITTEN, WRITTEN]


@pytest.mark.parametrize("block", (4, 1 << 16))
@pytest.mark.parametrize(
    "left, kept", ((b"one\ntw", "one\n"), (b"one\ntwo\n", "one\ntwo\n"), (b"on", ""), (b"\n", "\n"), (b"", ""))
)
def test_what_a_killed_process_has_left_of_a_line_is_no_part_of_the_next(
    tmp_path, said, say, monkeypatch, block, left, kept
):
    monkeypatch.setattr(telemetry, "BLOCK", block)
    path = tmp_path / "lines.txt"
    path.write_bytes(left)
    lines = LineFile(path, say)
    lines.add("a line")
    lines.add("another")
    lines.close()
    assert path.read_text() == f"{kept}a line\nanother\n" and said == []


def test_what_is_not_due_yet_is_not_tried(said, say, monkeypatch):
    monkeypatch.setattr(telemetry, "RETRY_S", 3600.0)
    tried = []

    def write() -> None:
        tried.append(1)
        raise ConnectionError("the server is gone")

    monitor = Droppable("a monitor", "entries", say)
    assert not any(monitor.attempt(write, Exception) for _ in range(3)) and len(tried) == 1
    monitor.at_once()
    assert monitor.attempt(lambda: None) and said == [UNWRITTEN, WRITTEN]


@pytest.mark.parametrize(
    "number, words",
    (
        (errno.ENOSPC, "disk full: "),
        (errno.EDQUOT, "disk quota used up: "),
        (errno.EROFS, "disk read-only: "),
        (errno.EACCES, "permission denied: "),
        (errno.EIO, "disk broken (input/output error): "),
        (errno.EFBIG, "File too large: "),
    ),
)
def test_each_reason_has_its_words_and_room_is_told_where_it_matters(tmp_path, number, words):
    text = folders.refusal(tmp_path / "x" / "y", OSError(number, "whatever"))
    assert text.startswith(f"{words}{tmp_path}/x/y can't be written")
    assert (" are free" in text) == (number in (errno.ENOSPC, errno.EDQUOT))


def test_a_file_that_cannot_be_written_says_so_in_one_line_whatever_the_writer_says(tmp_path):
    torch = pytest.importorskip("torch")
    many = {"weights": torch.zeros(100_000)}
    for path, what, reason in (
        (tmp_path / "full", many, "disk full: "),
        (tmp_path / "none" / "x", many, "No such file or directory: "),
        (tmp_path / "x", {"f": lambda: 1}, "pickle"),
    ):
        if path.name == "full":
            path.symlink_to("/dev/full")
        with pytest.raises(NotSaved) as caught:
            folders.write(path, lambda file: torch.save(what, file))
        assert reason in str(caught.value) and str(path) in str(caught.value) and "\n" not in str(caught.value)
        assert isinstance(caught.value, OSError) and isinstance(caught.value, RecycleError)


def test_the_planner_compiles_where_nothing_can_be_cached(tmp_path):
    """Whatever file it writes to has no room."""
    (tmp_path / "sums.py").write_text(
        "from recycle_plugin.planner.compiled import compiled\n\n@compiled\ndef add(a, b):\n    return a + b\n"
    )
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY)); import sums; "
        "print(sums.add(1, 2))"
    )
    variables = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.getcwd()}", "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    ended = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0 and ended.stdout == "3\n", ended.stderr[-2000:]
