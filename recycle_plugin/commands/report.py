"""``recycle report``: writes the report of a run, as the job itself does at its end."""

from __future__ import annotations

import argparse
from pathlib import Path

from recycle_plugin.commands.parsers import command

DESCRIPTION = """\
Write report.html to a run folder: what happened and what it cost in one sentence, why the job ended, throughput and
loss with the failures marked, with recycle.trace the schedule before and after, and the events.  The file needs
nothing else, and no network.

recycle report runs/train
"""


def add(commands: argparse._SubParsersAction) -> None:
    made = command(commands, "report", "write report.html of a run", DESCRIPTION, run)
    made.add_argument("folder", metavar="RUN_DIR", type=Path, help="the job's run folder")


def run(found: argparse.Namespace) -> int:
    """Write the report and print its path; returns the exit code.  Raises ValueError where the folder is no run's."""
    from recycle_plugin.observability import report

    print(report.write(found.folder))
    return 0
