"""``recycle report``: write the report of a run, as the job itself does at its end."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from recycle_plugin.commands.parsers import command
from recycle_plugin.observability.run_history import RunHistory
from recycle_plugin.observability.run_summary import end

DESCRIPTION = """\
Write report.html to a run folder: what happened and what it cost in one sentence, why the job ended, throughput and
loss with the failures marked, with recycle.trace the schedule before and after, and the events.  The file needs
nothing else, and no network.  With recycle.trace costs.json is there too: what instructions took and stages hold, for
recycle.costs of other runs and for recycle doctor.

recycle report runs/train
recycle report runs/train --follow

With --follow it is written anew every half a minute until the job ends, and browsers that have it open load it anew.
"""
EVERY_S = 30


def add(commands: argparse._SubParsersAction) -> None:
    made = command(commands, "report", "write report.html of a run", DESCRIPTION, run)
    made.add_argument("folder", metavar="RUN_DIR", type=Path, help="the job's run folder")
    made.add_argument("--follow", action="store_true", help="write it again and again until the job ends")


def run(found: argparse.Namespace) -> int:
    """Write the report, print its path, and return the exit code. Raises ValueError if the folder is no run folder."""
    from recycle_plugin.observability import report

    if found.follow:
        print(f"{found.folder / report.NAME} is written every {EVERY_S} s, until the job ends", flush=True)
    while found.follow and end(RunHistory.read(found.folder, whole=False)) is None:
        report.write(found.folder, EVERY_S)
        time.sleep(EVERY_S)
    print(report.write(found.folder))
    return 0
