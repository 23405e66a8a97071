"""Lines for the readers of what a job's processes print."""

from __future__ import annotations

import sys
from typing import TextIO


def say(line: str) -> None:
    """Print ``line`` on stderr, marked as the plugin's."""
    print_whole(f"recycle: {line}", sys.stderr)


def print_whole(line: str, file: TextIO | None = None) -> None:
    """Print ``line`` in one write: unbuffered print writes the line's end apart, and others' text gets between."""
    print(f"{line}\n", end="", file=file, flush=True)
