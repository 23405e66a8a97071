#!/usr/bin/env python
"""What the log costs: CPU time of its writer for so many megabytes, beside a bare write and CRC of the same bytes.

    scripts/bench_log.py [--megabytes 50] [--kilobytes 64 256 1024 4096] [--rounds 15] [--folder DIR] [--json FILE]

Both are run in turn, on tensors of --kilobytes; CPU time is the whole process's, all threads, the system's part too.
Medians over --rounds.  A record takes some microseconds besides, which small tensors show.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from zlib import crc32

sys.path.insert(0, str(Path(__file__).parents[1]))

from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.runtime.log.records import DatumRecord, Part, Stream
from recycle_plugin.runtime.log.writer import LogWriter


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=50.0, help="written in a round (default 50)")
    parser.add_argument(
        "--kilobytes",
        type=int,
        nargs="+",
        default=[64, 256, 1024, 4096],
        help="of each tensor (default 64 256 1024 4096)",
    )
    parser.add_argument("--rounds", type=int, default=15, help="of each way (default 15)")
    parser.add_argument("--folder", type=Path, help="where the files are (default: a temporary one)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here as well")
    found = parser.parse_args()
    if min(found.megabytes * 1000, *found.kilobytes, found.rounds) < 1:
        parser.error("--megabytes, --kilobytes and --rounds have to be positive")
    rows = []
    print(f"CPU ms for {found.megabytes:g} MB, {found.rounds} rounds\ntensor KB     bare      log   ratio")
    with tempfile.TemporaryDirectory(dir=found.folder) as folder:
        for kilobytes in found.kilobytes:
            row = measured(Path(folder), found.megabytes, kilobytes, found.rounds)
            rows.append(row)
            print(f"{kilobytes:9}  {row['bare_ms']:7.1f}  {row['log_ms']:7.1f}  {row['ratio']:6.2f}")
    if found.json is not None:
        found.json.write_text(json.dumps(rows, indent=1))
    return 0


def measured(folder: Path, megabytes: float, kilobytes: int, rounds: int) -> dict:
    count = max(1, round(megabytes * 1e6 / (kilobytes * 1024)))
    tensors = [random.Random(number).randbytes(kilobytes * 1024) for number in range(count)]
    times: dict[str, list[float]] = {"bare": [], "log": []}
    for number in range(rounds + 1):
        for name, way in (("bare", bare), ("log", logged)):
            place = folder / f"{kilobytes}-{number}-{name}"
            start = time.process_time()
            way(place, tensors)
            times[name] += [time.process_time() - start] if number else []  # the first is to warm up
            for path in sorted([*place.rglob("*"), place], reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
    plain, log = median(times["bare"]), median(times["log"])
    return {"kilobytes": kilobytes, "bare_ms": 1e3 * plain, "log_ms": 1e3 * log, "ratio": log / plain}


def bare(place: Path, tensors: Sequence[bytes]) -> None:
    """The least that must be done: a file, and a CRC."""
    descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    for tensor in tensors:
        crc32(tensor)
        assert os.write(descriptor, tensor) == len(tensor)
    os.close(descriptor)


def logged(place: Path, tensors: Sequence[bytes]) -> None:
    """A step of so many micro-batches."""
    stream = Stream("bench", WorkerId(0), Seat(0, 0))
    writer = LogWriter(place, stream, 2 * sum(map(len, tensors)), print)
    for number, tensor in enumerate(tensors):
        datum = Datum("act", 0, MicroBatch(0, number), 1)
        assert writer.keep(DatumRecord(datum, (Part("", "uint8", (len(tensor),)),), 0), [tensor])
    writer.commit(1, 0)
    writer.close()


if __name__ == "__main__":
    sys.exit(main())
