"""``recycle log``: show the logs in a folder, and check that all of them can be read."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from recycle_plugin.commands.losses import stages_text
from recycle_plugin.commands.parsers import command
from recycle_plugin.runtime.log.reader import LogReader, runs
from recycle_plugin.runtime.log.segment import LogFault, Segment, files

INSPECT = """\
Show the segments of each stream, with their steps and bytes, its gaps, and the steps of which everything is there.

recycle log inspect runs/train/log
"""
VERIFY = """\
Read every record of every segment and check it.  Prints one line for each fault: the file, the byte, and what was
expected there.  A last segment without an index is no fault: its writer was killed, or is still writing.

recycle log verify runs/train/log
"""
CODES = "Exit code: 0, or 1 if something can't be read; 2 for a wrong command."


def add(commands: argparse._SubParsersAction) -> None:
    made = commands.add_parser("log", help="look at what was logged for replays, check it")
    parts = made.add_subparsers(required=True, metavar="inspect|verify")
    for name, help_, description, run in (
        ("inspect", "segments, steps, bytes and gaps", INSPECT, inspect),
        ("verify", "every record is read and checked", VERIFY, verify),
    ):
        part = command(parts, name, help_, f"{description}\n{CODES}", run)
        part.add_argument("folder", metavar="FOLDER", type=Path, help="the folder with the segments")
        part.add_argument("--run", dest="job", metavar="ID", default=None, help="the run to read, if it has several")


def _reader(found: argparse.Namespace) -> LogReader:
    """Return a reader of the logs. Raises ValueError if it is not clear which logs are meant."""
    if not found.folder.is_dir():
        raise ValueError(f"there is no folder {found.folder}")
    known = runs(found.folder)
    if not files(found.folder):
        raise ValueError(f"{found.folder} has no segment of a log: name the folder of recycle.log, such as RUN/log")
    if found.job is None and len(known) > 1:
        raise ValueError(f"{found.folder} has logs of several runs, {', '.join(known)}: say which one with --run")
    if found.job is not None and found.job not in known:
        raise ValueError(f"{found.folder} has no log of run {found.job}: there are {', '.join(known) or 'none'}")
    return LogReader(found.folder, found.job or next(iter(known), ""))


# --- inspect and verify --------------------------------------------------------------------------------------


def inspect(found: argparse.Namespace) -> int:
    """Print the segments, gaps and whole steps, and return the exit code. Raises ValueError without such a folder."""
    reader = _reader(found)
    print(f"run {reader.run_id}, {_size(sum(each.size for each in _segments(reader)))}")
    for worker, segments in reader.segments.items():
        print(segments[0].stream)
        for segment in segments:
            print(f"  {_of_segment(segment)}")
        for gap in reader.gaps[worker]:
            print(f"  not kept: {gap}")
    whole = reader.whole
    print(f"whole: {stages_text(whole, 'step') if whole else 'no step'}")
    for step in sorted({*reader.committed} - {*whole}):
        print(f"not whole: step {step}: {'; '.join(reader.why_not(step))}")
    return _say(reader.faults)


def verify(found: argparse.Namespace) -> int:
    """Print a line for each fault, and return the exit code. Raises ValueError without such a folder."""
    reader = _reader(found)
    faults = reader.verify()
    segments = list(_segments(reader))
    if not faults:
        records = sum(len(each.entries) for each in segments)
        print(f"{records} records in {len(segments)} segments are as they were written")
    for segment in segments:
        if not segment.sealed and not any(fault.file == segment.path for fault in faults):
            print(f"{segment.path} has no index: its writer was killed, or is still writing")
    return _say(faults)


def _segments(reader: LogReader) -> Iterator[Segment]:
    return (each for segments in reader.segments.values() for each in segments)


def _of_segment(segment: Segment) -> str:
    steps = {each.step for each in segment.entries}
    said = f"steps {min(steps)} to {max(steps)}" if steps else "no step"
    index = "" if segment.sealed else ", without an index"
    return f"{segment.path.name}: {said}, {len(segment.entries)} records, {_size(segment.size)}{index}"


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


def _say(faults: Sequence[LogFault]) -> int:
    for fault in faults:
        print(fault)
    return int(bool(faults))
