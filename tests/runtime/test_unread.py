"""Printing goes on where nobody reads it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, sys
from pathlib import Path
from recycle_plugin.runtime.system.unread import outlive_readers
outlive_readers()
print("read")
sys.stdout.flush()
print("read too", file=sys.stderr)
sys.stdin.readline()
for _ in range(3):
    print("x" * 100000)
    print("y" * 100000, file=sys.stderr)
if os.fork() == 0:
    print("a fork prints")
    sys.stdout.flush()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
sys.stdout.flush()
Path(sys.argv[1]).touch()
"""


@pytest.mark.parametrize("options", ([], ["-u"]), ids=("buffered", "not buffered"))
def test_a_process_goes_on_whose_output_nobody_reads(options, tmp_path):
    ends = [os.pipe() for _ in range(2)]
    program = subprocess.Popen(
        [sys.executable, *options, "-c", PROGRAM, str(tmp_path / "through")],
        stdin=subprocess.PIPE,
        stdout=ends[0][1],
        stderr=ends[1][1],
        cwd=Path(__file__).parents[2],
    )
    for (reader, writer), said in zip(ends, (b"read\n", b"read too\n")):
        os.close(writer)
        with os.fdopen(reader, "rb") as reading:
            assert reading.readline() == said
    program.stdin.write(b"\n")
    program.stdin.close()
    assert program.wait(60) == 0 and (tmp_path / "through").exists()
