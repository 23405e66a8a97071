"""A test that fails beside others and passes by itself is named; too many of them, or an old one, are no pass."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECOND_TIME_LUCKY = """
from pathlib import Path
import pytest

@pytest.mark.parametrize("case", range({count}))
def test_it(case):
    seen = Path(__file__).with_name(f"seen{{case}}")
    first = not seen.exists()
    seen.touch()
    assert not first

def test_other():
    assert {other}
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.again", "--rootdir", str(folder), *arguments]
    command += ["-c", "/dev/null", "-o", f"cache_dir={folder}/cache", str(folder / "test_it.py")]
    env = {"PATH": "", "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60)


def twice(folder: Path, count: int, other: bool = True, known: str = "") -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(SECOND_TIME_LUCKY.format(count=count, other=other))
    (folder / "known").write_text(known)
    assert run(folder).returncode == 1
    again = ("--last-failed", "--again", str(folder / "runs" / "flaky"), "--known-flaky", str(folder / "known"))
    return run(folder, *again)


def test_a_test_that_passes_by_itself_is_named_last_but_one_and_in_a_file(tmp_path: Path) -> None:
    second = twice(tmp_path, 2)
    assert second.returncode == 0
    *_, first, other, closing = second.stdout.splitlines()
    assert (first, other) == ("flaky: test_it.py::test_it[0]", "flaky: test_it.py::test_it[1]")
    assert "2 passed" in closing
    assert (tmp_path / "runs" / "flaky").read_text() == "test_it.py::test_it[0]\ntest_it.py::test_it[1]\n"


def test_a_test_that_fails_again_is_no_pass(tmp_path: Path) -> None:
    second = twice(tmp_path, 1, other=False)
    assert second.returncode == 1
    assert "flaky: test_it.py::test_it[0]" in second.stdout
    assert "1 failed, 1 passed" in second.stdout


@pytest.mark.parametrize(
    ("count", "known", "why"),
    [
        (4, "", "4 tests have failed, and at most 3 are run again"),
        (1, "test_it.py::test_it[0]  a port\n", "flaky before, and not mended: test_it.py::test_it[0]"),
    ],
)
def test_too_many_or_an_old_one_are_no_pass(tmp_path: Path, count: int, known: str, why: str) -> None:
    second = twice(tmp_path, count, known=known)
    assert second.returncode == 1
    assert why in second.stdout + second.stderr
