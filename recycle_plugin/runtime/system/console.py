"""Lines for whoever reads what a job's processes print."""

from __future__ import annotations

import sys
from typing import TextIO


def say(line: str) -> None:
    """Print ``line`` as the plugin's, on stderr and at once."""
    print_whole(f"recycle: {line}", sys.stderr)


def print_whole(line: str, file: TextIO | None = None) -> None:
    """Print ``line`` at once, on stdout by default, and in one write: an unbuffered print writes the end of a line by
    itself, and another process's line gets in between.
    """
    print(f"{line}\n", end="", file=file, flush=True)
