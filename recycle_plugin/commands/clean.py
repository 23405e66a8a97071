"""``recycle clean``: remove what finished jobs have left behind and nothing will read."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from recycle_plugin import folders
from recycle_plugin.commands.parsers import command
from recycle_plugin.observability.run_history import RunHistory
from recycle_plugin.observability.run_summary import end
from recycle_plugin.runtime.control.claims import Claims

DESCRIPTION = """\
Show what can be removed of jobs that are over, and its bytes: logs, which only the job itself could replay, and
checkpoints that were never completed.  With --yes, remove it.  Whole checkpoints, events and reports stay.  Nothing is
removed of a job that may run: its folder is locked, or its event log has no end and is less than an hour old.

recycle clean runs/*
recycle clean runs/train --yes

Exit code: 0; 1 if something was kept because its job may run, or could not be removed; 2 for bad input.
"""
LOGS = re.compile(r"\d+\.\d+-\d+\.log|\d+\.mirror")  # names of files in a folder of logs, as runtime/log/ makes them
LATE_S = 60.0  # how long after its last event a job's own processes may still write


class Leftover(NamedTuple):
    """Files and folders that may be removed, with a name for them."""

    what: str
    paths: tuple[Path, ...]

    @property
    def bytes(self) -> int:
        return sum(map(folders.taken, self.paths))


def add(commands: argparse._SubParsersAction) -> None:
    made = command(commands, "clean", "remove what ended jobs have left behind", DESCRIPTION, run)
    made.add_argument("folders", nargs="+", metavar="RUN_DIR", type=Path, help="the jobs' run folders")
    made.add_argument("--yes", action="store_true", help="remove it; without this it is only shown")


def run(found: argparse.Namespace) -> int:
    """Show the removable files, or remove them, and return the exit code. Raises ValueError for other folders."""
    histories = {
        folder: RunHistory.read(folder, whole=False) for folder in found.folders
    }  # read all before removing anything
    kept, total, unlocked = False, 0, list[str]()
    for folder, history in histories.items():
        claims = Claims(unlocked.append, "recycle clean")  # no job may start in the folder meanwhile
        try:
            if why := _runs(folder, history, claims, unlocked):
                print(f"{folder}: kept: {why}")
                kept = True
                continue
            for left in leftovers(folder, history):
                size = left.bytes
                print(f"{folder}: {folders.size(size)}: {left.what}")
                total += size
                kept |= found.yes and not _removed(left)
        finally:
            claims.release()
    said = "nothing to remove" if not total else "removed" if found.yes else "can be removed: --yes does so"
    if total or not kept:
        print(f"{folders.size(total)} in all {said}" if total else said)
    return int(kept)


def _runs(folder: Path, history: RunHistory, claims: Claims, unlocked: list[str]) -> str:
    """Return why the job in ``folder`` runs or may run, or "" after claiming its folders. Reasons why a folder could
    not be claimed are appended to ``unlocked``.
    """
    for setting, place in {"run_dir": folder, **_told(folder, history)}.items():
        if place.is_dir() and (why := claims.claim(setting, place)):
            return why.partition(": set ")[0]  # without advice for who starts a job
    silent_s = time.time() - history.events[-1]["time"]
    if end(history) is not None or (silent_s > folders.STALE_S and not unlocked):
        return ""
    return "; ".join([f"its event log has no end, and the last event is {silent_s:.0f} s old", *unlocked])


def _told(folder: Path, history: RunHistory) -> dict[str, Path]:
    """Return the folders that the job's settings name: {setting: folder}. A relative path is included only if the job's
    own relative run folder leads to ``folder`` from here.
    """
    run_dir = Path(history.job["run_dir"])
    here = not run_dir.is_absolute() and run_dir.resolve() == folder.resolve()
    places = {setting: Path(place) for setting, place in history.job.get("folders", ())}
    return {setting: place for setting, place in places.items() if here or place.is_absolute()}


def leftovers(folder: Path, history: RunHistory) -> Iterator[Leftover]:
    told = _told(folder, history)
    logs = told.get("log.folder", folder / "log")
    kept = tuple(path for path in sorted(logs.glob("*")) if LOGS.fullmatch(path.name))
    if kept:
        yield Leftover(f"logs for replays, {len(kept)} files in {logs}", kept)
    saved = {Path(event["path"]).parent for event in history.of("checkpoint")}
    found = {path.resolve() for place in {*told.values(), *saved} for path in place.glob(f"*{folders.UNFINISHED}*")}
    found |= {path.resolve() for path in folder.rglob(f"*{folders.UNFINISHED}*")}
    # by the clock of the coordinator's host, which may be ahead
    ended = min(history.events[-1]["time"] + LATE_S, time.time() - LATE_S)
    for path in sorted(found):
        # another job may be writing there, also in this run folder
        last, own = folders.written_last(path), path.is_relative_to(folder.resolve())
        if time.time() - last > folders.STALE_S or (own and last < ended):
            yield Leftover(f"an unfinished checkpoint, {path}", (path,))


def _removed(left: Leftover) -> bool:
    """Remove ``left`` and return whether all of it is gone; print a path that remains."""
    for path in left.paths:
        with suppress(OSError):
            folders.remove(path)
    there = [path for path in left.paths if path.exists()]
    if there:
        print(f"{there[0]} could not be removed")
    return not there
