"""``recycle log``: what is in the logs of a folder, whether all of it can be read, and a step's tensors as files."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy

from recycle_plugin import folders
from recycle_plugin.commands.losses import stages_text
from recycle_plugin.runtime.log.reader import LogReader, runs
from recycle_plugin.runtime.log.records import ITEM_BYTES, Part
from recycle_plugin.runtime.log.segment import Damaged, Fault, Segment, files

INSPECT = """\
Show the segments of each stream, with their steps and bytes, its gaps, and the steps of which everything is there.

recycle log inspect runs/train/log
"""
VERIFY = """\
Read every record of every segment and check it.  Prints one line for each fault: the file, the byte, and what was
expected there.  A last segment without an index is none: its writer was killed, or is still writing.

recycle log verify runs/train/log
"""
EXPORT = """\
Write a step's tensors as numpy files, and manifest.json, which says what each is.  A type that numpy does not have,
such as bfloat16, is written as unsigned numbers of the same bits; the manifest has its name.

recycle log export runs/train/log 17 --out step17
"""
CODES = "Exit code: 0, or 1 where something can't be read; 2 for a wrong command."
MANIFEST = "manifest.json"
NOT_IN_NUMPY = ("bfloat", "float8")
"""How the names of types begin that numpy does not have."""


def add(commands: argparse._SubParsersAction) -> None:
    """Add the subcommand with its three parts."""
    made = commands.add_parser("log", help="look at what was logged for replays, check it, write it as files")
    parts = made.add_subparsers(required=True, metavar="inspect|verify|export")
    for name, help_, description, run in (
        ("inspect", "segments, steps, bytes and gaps", INSPECT, inspect),
        ("verify", "every record is read and checked", VERIFY, verify),
        ("export", "a step's tensors as numpy files", EXPORT, export),
    ):
        part = parts.add_parser(
            name,
            help=help_,
            description=f"{description}\n{CODES}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        part.add_argument("folder", metavar="FOLDER", type=Path, help="where the segments are")
        part.add_argument("--run", dest="job", metavar="ID", default=None, help="of several runs in it, this one")
        if run is export:
            part.add_argument("step", metavar="STEP", type=int)
            part.add_argument("--out", metavar="DIR", type=Path, required=True, help="a new folder for the files")
        part.set_defaults(run=run)


def _reader(found: argparse.Namespace) -> LogReader:
    """Raises ValueError where it isn't clear which logs are meant."""
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
    """Print what is there; returns the exit code.  Raises ValueError where there is no such folder."""
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
    """Print a line for each fault; returns the exit code.  Raises ValueError where there is no such folder."""
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


def _say(faults: Sequence[Fault]) -> int:
    for fault in faults:
        print(fault)
    return int(bool(faults))


# --- export --------------------------------------------------------------------------------------------------


def export(found: argparse.Namespace) -> int:
    """Write the files; returns the exit code.  Raises ValueError where the step is not in the log, or there is a folder
    of that name already.
    """
    reader = _reader(found)
    if found.step not in reader.committed:
        raise ValueError(f"{found.folder}: {'; '.join(reader.why_not(found.step))}")
    if found.out.exists():
        raise ValueError(f"--out {found.out} exists already")
    folders.make(found.out)
    manifest = {
        "run": reader.run_id,
        "step": found.step,
        "not_whole": reader.why_not(found.step),
        "data": list(_data(reader, found.step, found.out)),
        "records": list(_records(reader, found.step)),
        "faults": [str(fault) for fault in reader.faults],
    }
    (found.out / MANIFEST).write_text(json.dumps(manifest, indent=1))
    print(f"{len(manifest['data'])} data and {len(manifest['records'])} records of step {found.step} in {found.out}")
    return _say(reader.faults)


def _data(reader: LogReader, step: int, out: Path) -> Iterator[dict]:
    """The manifest's lines on the data of a step, whose tensors are written; what can't be read is a fault."""
    for datum in sorted(reader.data(step), key=lambda each: (each.kind, each.stage, each.micro_batch or ())):
        try:
            record, tensors = reader.get(datum)
        except Damaged as error:
            reader.faults.append(error.fault)
            continue
        name = f"{datum.kind}-{datum.stage}" + (f"-{datum.micro_batch}" if datum.micro_batch else "")
        yield {
            "kind": datum.kind,
            "stage": datum.stage,
            "micro_batch": str(datum.micro_batch) if datum.micro_batch else None,
            "valid_from": record.valid_from,
            "tensors": list(_tensors(out, name, record.parts, tensors)),
        }


def _records(reader: LogReader, step: int) -> Iterator[dict]:
    for stream, record in reader.step_records(step):
        rank, incarnation = stream.worker
        yield {
            **asdict(record),
            "rank": rank,
            "incarnation": incarnation,
            "seat": str(stream.seat),
            "shard": stream.shard,
        }


def _tensors(out: Path, name: str, parts: Sequence[Part], tensors: Sequence[bytearray]) -> Iterator[dict]:
    for place, (part, tensor) in enumerate(zip(parts, tensors, strict=True)):
        file = f"{name}-{place}.npy"
        numpy.save(out / file, numpy.frombuffer(tensor, _numpy_type(part)).reshape(part.shape))
        yield {"file": file, **asdict(part)}


def _numpy_type(part: Part) -> numpy.dtype:
    name = f"uint{8 * ITEM_BYTES[part.dtype]}" if part.dtype.startswith(NOT_IN_NUMPY) else part.dtype
    return numpy.dtype(name).newbyteorder("<")
