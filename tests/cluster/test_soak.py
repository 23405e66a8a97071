"""Jobs that lose every worker that they can lose, one after the other: survivors gather neither descriptors nor
threads, sockets or memory, and nothing is left running (the fixture ``launch`` looks).  Nobody comes back here: the
jobs of tests/cluster/test_rejoin.py are measured while all do.  ``--soak MINUTES`` repeats it with other orders of
deaths.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from random import Random
from typing import NamedTuple

import psutil
import pytest

from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.topology import Topology
from tests.support.jobs import WRAPPED, Shape, after_step, held
from tests.support.launching import launching

pytestmark = pytest.mark.plain_too

SHORT, LONG = Shape(replicas=3), Shape(replicas=4)
SETTLED = 8  # commits after a failure until its traces have to be gone
EACH = SETTLED + 4  # steps until the job waits for the next death, or for being let go
GROWTH_BYTES = 24 << 20  # of a survivor, from before the first death to the end: less than torch's heap varies by


class Used(NamedTuple):
    descriptors: int
    threads: int
    sockets: int
    # bytes; what is shared with the fork server counts from the start, and being copied on a write adds nothing
    memory: int

    @classmethod
    def by(cls, pid: int) -> Used:
        process = psutil.Process(pid)
        return cls(
            process.num_fds(), process.num_threads(), len(process.net_connections("tcp")), process.memory_info().rss
        )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "minutes" in metafunc.fixturenames:
        minutes = metafunc.config.getoption("--soak")
        metafunc.parametrize("minutes", [pytest.param(minutes, marks=pytest.mark.timeout(600 + 60 * minutes))])


def test_survivors_gather_nothing(starts, vehicle, tmp_path, minutes):
    server, start = starts
    started, jobs, forked = time.monotonic(), 0, None
    while not jobs or time.monotonic() < started + 60 * minutes:
        with launching(server, tmp_path / str(jobs), start, vehicle) as launch:
            lose_all(launch, LONG if minutes else SHORT, Random(jobs), tmp_path / f"gate{jobs}")
        descriptors = psutil.Process(server._process.pid).num_fds()
        assert forked is None or descriptors <= forked, "descriptors of the fork server"
        jobs, forked = jobs + 1, descriptors


def lose_all(launch, shape: Shape, random: Random, folder: Path) -> None:
    doomed = deaths(shape, random)
    holds = [held(folder, EACH * number, str(number)) for number in range(1, len(doomed) + 2)]
    settings = f"steps={EACH * (len(doomed) + 1)}", "recycle.rejoin=never"
    run = launch(*settings, shape=shape, script=WRAPPED, RECYCLE_TEST_WRAP=json.dumps(holds))
    after_step(run, SETTLED)
    (start,) = run.of("start")
    pids = {seat: run.pids()[rank] for seat, rank in start["seats"].items()}
    first = {seat: Used.by(pid) for seat, pid in pids.items()}
    for number, seat in enumerate(doomed, 1):
        os.kill(pids.pop(seat), signal.SIGKILL)
        (folder / str(number)).touch()
        run.wait_for(lambda: len(resumes(run)) > number, f"word that it goes on without seat {seat}")
        after_step(run, resumes(run)[-1]["committed"] + SETTLED)
        for survivor, pid in pids.items():
            run.wait_for(
                lambda: fits(Used.by(pid), first[survivor], more_peers(survivor, pids)),
                f"end of what seat {survivor} held for {seat}",
                20,
            )
    last = {seat: Used.by(pid) for seat, pid in pids.items()}
    (folder / str(len(doomed) + 1)).touch()
    result = run.finish()
    print(
        f"{', '.join(doomed)} lost; "
        + "; ".join(f"{seat}: {tuple(first[seat])} to {tuple(last[seat])}" for seat in last)
    )
    assert result.code == 0 and not result.restarted and len(result.losses) == EACH * (len(doomed) + 1), result.output[
        -6000:
    ]
    assert [event["seat"] for event in result.of("lost")] == doomed
    assert not [seat for seat in last if last[seat].memory > first[seat].memory + GROWTH_BYTES]


def deaths(shape: Shape, random: Random) -> list[str]:
    """All seats but one of each stage, in some order."""
    seats = list(Topology(shape.replicas, shape.stages, shape.micro_batches).seats)
    left = [Seat(random.randrange(shape.replicas), stage) for stage in range(shape.stages)]
    return [str(seat) for seat in random.sample(seats, len(seats)) if seat not in left]


def more_peers(seat: str, live: dict[str, int]) -> int:
    """With how many more workers of the neighbouring stages it may exchange tensors than at the start, when there was
    one in each.
    """
    stage = int(seat.partition(".")[2])
    others = [int(other.partition(".")[2]) for other in live]
    return sum(max(0, others.count(neighbour) - 1) for neighbour in (stage - 1, stage + 1))


def fits(now: Used, first: Used, more: int) -> bool:
    """One way out and one way in for each, and a thread for each way."""
    return all(now[kind] <= first[kind] + 2 * more for kind in range(3))


def resumes(run) -> list[dict]:
    return run.of("resume")
