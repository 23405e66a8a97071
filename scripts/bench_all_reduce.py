#!/usr/bin/env python
"""The fault-tolerant all-reduce beside Gloo's own: the sum of gradients over the workers of a stage, or the replicas.

    scripts/bench_all_reduce.py [--members 2 4] [--mib 1 4 16 64 256] [--rounds 15] [--out DIR]

A job under the plugin's launcher has both: the group of REDUCE (runtime/collectives/), which a loss interrupts and
which is made anew among the survivors, and a process group of Gloo's own among the same processes. They sum the same
buffers of fp32 in turn; the order changes from round to round. Medians over --rounds, of the slowest member of each.

"second buffer": the same as in a step, with the copy that leaves the contributions unchanged, and the division; Gloo's
column is its sum alone, in place. If ours takes more than 1.1 times as long, the table divides its time: "in sums" has
a piece in Gloo's hands, "around" is before the first, between two and after the last.

Targets: ratio at most 1.1 as the median over sizes, and at most 1.5 at each.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from recycle_plugin.core.vocabulary.instruction import Instruction, Op
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.lab.experiments.bench_scripts import DEADLINE_S, run_part, script
from recycle_plugin.lab.runs import JobRun, environment
from recycle_plugin.launch import free_port
from recycle_plugin.runtime.collectives import gloo
from recycle_plugin.runtime.collectives.link import Handle, Operation
from recycle_plugin.runtime.collectives.place import meet
from recycle_plugin.runtime.control import session
from recycle_plugin.runtime.stage.buckets import MeanBuckets

TYPICAL, WORST = 1.1, 1.5
JOB = "BENCH_ALL_REDUCE"  # the environment variable with a worker's part
TIMEOUT = timedelta(seconds=DEADLINE_S)
WARM_UP = 2


def main(arguments: list[str]) -> int:
    found = parser().parse_args(arguments)
    found.part = "all_reduce"
    return run_part({"all_reduce": compare}, found)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--members", type=int, nargs="+", default=[2, 4])
    made.add_argument("--mib", type=float, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 256], help="of a buffer")
    made.add_argument("--rounds", type=int, default=15)
    made.add_argument("--out", type=Path, default=Path("runs/bench_all_reduce"), metavar="DIR")
    return made


def compare(found: argparse.Namespace) -> dict:
    """Return rows by number of members and size."""
    rows = [row for members in found.members for row in measured(members, found.mib, found.rounds, found.out)]
    for row in rows:
        print(shown(row), flush=True)
    ratios = [row["ratio"] for row in rows]
    met = median(ratios) <= TYPICAL and max(ratios) <= WORST
    print(
        f"ratio: median over sizes {median(ratios):.3f}, target at most {TYPICAL}; largest {max(ratios):.3f}, target "
        f"at most {WORST}: {'met' if met else 'NOT MET'}"
    )
    return {"rows": rows, "rounds": found.rounds, "median": median(ratios), "largest": max(ratios), "met": met}


def measured(members: int, sizes: list[float], rounds: int, out: Path) -> list[dict]:
    """Run a job of so many members; return a row for each size. Raises RunFailed."""
    folder = (out / f"members{members}").resolve()
    for stale in [*folder.glob("times*.json"), *folder.glob("store")]:
        stale.unlink()
    given = {"folder": str(folder), "members": members, "numbers": [int(size * 2**18) for size in sizes]}
    command = [sys.executable, "-m", "recycle_plugin.launch", "--workers", str(members)]
    command += ["--port", str(free_port()), str(Path(__file__).resolve())]
    with JobRun(folder, command, environment(**{JOB: json.dumps(given | {"rounds": rounds})})) as run:
        run.wait_for(lambda: len([*folder.glob("times*.json")]) == members, "all members' times", DEADLINE_S)
    told = [json.loads(path.read_text()) for path in sorted(folder.glob("times*.json"))]
    return [row(members, size, [each[place] for each in told]) for place, size in enumerate(sizes)]


def row(members: int, mib: float, told: list[dict[str, list[float]]]) -> dict:
    """Return the medians of one size, for each kind of sum, over the slowest member of each round."""
    found = {way: 1e3 * median(map(max, zip(*(each[way] for each in told)))) for way in told[0]}
    return {"members": members, "mib": mib, "ratio": found["ours"] / found["gloo"], **found}


def shown(row: dict) -> str:
    text = (
        f"{row['members']} members, {row['mib']:5g} MiB: gloo {row['gloo']:7.2f} ms, ours {row['ours']:7.2f} ms, ratio "
        f"{row['ratio']:.3f}; with the second buffer and the division {row['second buffer']:7.2f} ms"
    )
    if row["ratio"] > TYPICAL:
        text += f"\n    ours: in sums {row['in sums']:.2f} ms, around {row['around']:.2f} ms"
    return text


# --- a member ------------------------------------------------------------------------------------------


class UnderWay:
    """The seconds in which at least one of a link's operations was under way; a profile of the time around them."""

    def __init__(self) -> None:
        self.seconds, self._now, self._since = 0.0, 0, 0.0
        begin = gloo.GlooLink._begin

        def watched(link: gloo.GlooLink, operation: Operation, handle: Handle) -> None:
            self._since = self._since if self._now else time.perf_counter()
            self._now += 1
            handle.when_over(self._over)
            begin(link, operation, handle)

        gloo.GlooLink._begin = watched

    def _over(self) -> None:
        self._now -= 1
        if not self._now:
            self.seconds += time.perf_counter() - self._since


def member(given: dict) -> None:
    """Measure, in one of a job's processes, and write this member's times."""
    torch.set_num_threads(1)
    line, rank, members = session.of_this_process(), int(os.environ["RANK"]), given["members"]
    peers = meet(line, Topology(members, 1, 1)).peers
    store = dist.FileStore(f"{given['folder']}/store", members)
    make: Any = dist.ProcessGroupGloo  # torch's stub lacks its operations
    own, meeting = (make(dist.PrefixStore(name, store), rank, members, TIMEOUT) for name in ("own", "meeting"))
    buckets, watch = MeanBuckets(peers), UnderWay()
    times = []
    with line.thread.at_work(Instruction(Op.REDUCE, 0, None, 1)):
        for numbers in given["numbers"]:
            ways = {
                "gloo": lambda buffer: own.allreduce([buffer]).wait(),
                "ours": lambda buffer: peers.sum_into(buffer, (), 1.0),
                "second buffer": lambda buffer: buckets.all_reduce([buffer]),
            }
            times.append(in_turn(ways, torch.empty(numbers), given["rounds"], meeting, watch))
    path = Path(given["folder"]) / f"times{rank}"
    path.write_text(json.dumps(times))
    path.rename(path.with_suffix(".json"))  # the new name says that the file is whole
    meeting.barrier(dist.BarrierOptions()).wait()


def in_turn(
    ways: dict[str, Callable[[torch.Tensor], object]],
    buffer: torch.Tensor,
    rounds: int,
    meeting: Any,
    watch: UnderWay,
) -> dict[str, list[float]]:
    """Return seconds of each kind of sum by round, and how those of "ours" divide. Checks the sums.

    All meet before each sum in a separate group, ``meeting``: a group just used is quicker on busy cores.
    """
    found: dict[str, list[float]] = {way: [] for way in (*ways, "in sums", "around")}
    for number in range(WARM_UP + rounds):
        for way in ways if number % 2 else reversed(ways):
            buffer.fill_(1.0)
            meeting.barrier(dist.BarrierOptions()).wait()
            watch.seconds, begun = 0.0, time.perf_counter()
            made = ways[way](buffer)
            taken = time.perf_counter() - begun
            _check(way, buffer, made, meeting.size())
            for name, seconds in [(way, taken), *_parts(way, taken, watch.seconds)]:
                found[name] += [seconds] if number >= WARM_UP else []
    return found


def _check(way: str, buffer: torch.Tensor, made: object, members: int) -> None:
    """Raise AssertionError if the result is not the sum, or, with unchanged contributions, not their mean."""
    stays = way == "second buffer"
    expected = [(buffer, 1.0 if stays else float(members)), *([(made, 1.0)] if isinstance(made, torch.Tensor) else [])]
    for found, value in expected:
        if found[0] != value or found[-1] != value:
            raise AssertionError(f"{way}: {found[0]} where {value} is right")


def _parts(way: str, taken: float, in_sums: float) -> list[tuple[str, float]]:
    return [("in sums", in_sums), ("around", taken - in_sums)] if way == "ours" else []


if __name__ == "__main__":
    if JOB in os.environ:
        member(json.loads(os.environ[JOB]))
    else:
        script(main)
