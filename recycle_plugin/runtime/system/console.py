"""Lines for whoever reads what a job's processes print."""

from __future__ import annotations

import sys


def say(line: str) -> None:
    """Print ``line`` as the plugin's, on stderr and at once."""
    print(f"recycle: {line}", file=sys.stderr, flush=True)
