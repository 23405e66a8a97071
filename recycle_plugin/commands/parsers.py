"""How commands are added to the command line, and how they find a job: by its run folder, or its coordinator."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path


def command(
    commands: argparse._SubParsersAction, name: str, about: str, description: str, run: Callable
) -> argparse.ArgumentParser:
    """Return the parser of a new command; its help shows ``description`` as it is. ``about``: its line in the list."""
    made: argparse.ArgumentParser = commands.add_parser(
        name, help=about, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.set_defaults(run=run)
    return made


def add_job(parser: argparse.ArgumentParser) -> None:
    """Add the argument that names the job, for :func:`folder_of`."""
    parser.add_argument(
        "job", metavar="RUN_DIR|ADDRESS", help="the job's run folder, or its coordinator's host and port"
    )


def folder_of(job: str) -> Path:
    """Return the run folder of ``job``, a path or the coordinator's address (node1:29500). Raises ValueError."""
    host, _, port = job.rpartition(":")
    if Path(job).exists() or not host or not port.isdecimal() or "/" in job:
        return Path(job)
    from recycle_plugin.commands.running_job import folder_at  # slow to import: only an address needs it

    return folder_at(host, int(port))
