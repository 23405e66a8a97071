"""Notices of each kind at a random instant of each moment of a job: signals to a worker, and a file or an HTTP answer
that ``leave_on`` asks for. With --all-kills there are a hundred: the table of docs/operations.md.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from random import Random

import pytest
import torch

from recycle_plugin.cli import main
from tests.jobs import noticed
from tests.support.cluster import Result, Run
from tests.support.hosts import Hosts, HostsRun
from tests.support.launching import here

SCRIPT, RANKS = "tests/jobs/noticed.py", 4
AT_START, LATER = ("first step", "compile"), ("evaluation", "save", "catch-up")
KINDS = ("SIGTERM", "SIGUSR1", "SIGUSR2", "file", "HTTP")
SHORT_S = 0.05  # the longest time from the beginning of a moment to a notice


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "times" in metafunc.fixturenames:
        metafunc.parametrize("times", (4 if metafunc.config.getoption("--all-kills") else 1,))


def phase(run: Run, rank: int) -> str:
    place = run.folder / f"phase{rank}"
    return place.read_text().strip() if place.exists() else ""


def in_moment(run: Run, random: Random, ranks: Iterable[int], moment: str) -> int:
    rank = run.wait_for(lambda: [each for each in ranks if phase(run, each) == moment], moment)[0]
    time.sleep(random.uniform(0, SHORT_S))  # the instant
    return rank


def come(run: Run, rank: int) -> Counter[int]:
    return Counter(map(int, (run.folder / f"signals{rank}.txt").read_text().split()))


ENDS = ("left", "held_back", "restart")  # restart: a newcomer that nobody counted on


def said(run: Run, rank: int, *kinds: str) -> list[str]:
    return [event["event"] for event in run.events() if event["event"] in kinds and event.get("rank") == rank]


def member(run: Run, rank: int) -> bool:
    return said(run, rank, "left", "rejoined", "lost", "held_back")[-1:] in ([], ["rejoined"])


class Signalled:
    """A job on one host, whose workers get a signal."""

    ranks = tuple(range(RANKS))

    def __init__(self, server, folder: Path, kind: str) -> None:
        self.number, self.sent = getattr(signal, kind), Counter[int]()
        self.leaves = kind == "SIGTERM"
        self.run = here(server, folder, RANKS, SCRIPT, [str(folder)])

    def close(self) -> list[str]:
        return self.run.clean()

    def give(self, rank: int) -> None:
        """Give a notice, and wait for what follows; who has left is admitted again."""
        before = len(said(self.run, rank, *ENDS))
        os.kill(self.run.pids()[rank], self.number)
        if self.leaves:
            ends = self.run.wait_for(lambda: said(self.run, rank, *ENDS)[before:], f"leave of rank {rank}")
            if ends != ["restart"]:
                assert main(["admit", f"{rank}.0", "--run", str(self.run.folder)]) == 0
            return
        self.sent[rank] += 1
        self.run.wait_for(lambda: come(self.run, rank)[self.number] == self.sent[rank], f"signal at rank {rank}")


class Announced(Signalled):
    """A job on two hosts, of which the second is announced to go away by a file there, or by an HTTP endpoint."""

    ranks = (2, 3)  # of host beta
    leaves = True

    def __init__(self, pair: Hosts, server, folder: Path, kind: str) -> None:
        self._pair, self._going, self._endpoint = pair, folder / "going" / "beta", None
        self._going.parent.mkdir(parents=True)
        asks = f"test -e {self._going.parent}/$(hostname)"
        if kind == "HTTP":
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            serves = [sys.executable, "-m", "http.server", str(port), "-d", str(self._going.parent)]
            self._endpoint = subprocess.Popen(
                [*pair.entering("beta"), *serves], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            asks = f"curl -sf -o /dev/null 127.0.0.1:{port}/$(hostname)"
        self.run = HostsRun(pair, server, folder, RANKS, SCRIPT, [str(folder), asks])

    def give(self, rank: int) -> None:
        before = {each: len(said(self.run, each, *ENDS)) for each in self.ranks}
        self._going.touch()
        gone = lambda: all(said(self.run, each, *ENDS)[before[each] :] for each in self.ranks)
        self.run.wait_for(gone, "leave of the host's workers")
        self._going.unlink()
        for each in self.ranks:
            admit = [sys.executable, "-m", "recycle_plugin.cli", "admit", f"{each}.0", "--run", str(self.run.folder)]
            subprocess.run([*self._pair.entering("alpha"), *admit], timeout=120, check=True)

    def close(self) -> list[str]:
        if self._endpoint is not None:
            self._endpoint.kill()
            self._endpoint.wait()
        return self.run.clean()


def newcomer(job, random: Random) -> int:
    """Return the rank of a worker that comes back, once it asks to take part."""
    rank, run = random.choice(job.ranks), job.run
    before = len(run.of("newcomer"))
    if job.leaves:
        job.give(rank)
    else:
        os.kill(run.pids()[rank], signal.SIGKILL)
    run.hear("newcomer", before + 1)
    time.sleep(random.uniform(0, SHORT_S))
    return rank


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("moment", AT_START)
def test_at_the_start(jobs, kind, moment, times):
    for seed in range(times):
        job = jobs(kind)
        job.give(in_moment(job.run, Random(seed), job.ranks, moment))
        ends_well(job)


@pytest.fixture
def jobs(plain_server, request, tmp_path) -> Iterator[Callable[[str], Signalled]]:
    made: list[Signalled] = []

    def start(kind: str) -> Signalled:
        of = partial(Announced, request.getfixturevalue("pair")) if kind in ("file", "HTTP") else Signalled
        made.append(of(plain_server, tmp_path / f"run{len(made)}", kind))
        return made[-1]

    yield start
    left = [thing for job in made for thing in job.close()]
    assert not left, left


@pytest.mark.parametrize("kind", KINDS)
def test_later(jobs, kind, times):
    random, job = Random(kind), jobs(kind)
    run = job.run
    run.hear("committed", 2)
    for moment in LATER * times:
        run.wait_for(lambda: all(member(run, rank) for rank in job.ranks), "return of all")
        rank = newcomer(job, random) if moment == "catch-up" else in_moment(run, random, job.ranks, moment)
        job.give(rank)
        print(f"{kind}, {moment}: step {run.of('committed')[-1]['step']}, {said(run, rank, *ENDS)[-1:]}")
    ends_well(job)


def ends_well(job) -> Result:
    run = job.run
    run.hear("committed", len(run.of("committed")) + 3)
    (run.folder / "go").touch()
    result = run.finish()
    assert result.code == 0 and not result.of("error"), result.output[-6000:]
    if job.leaves:
        assert not result.of("lost"), result.output[-6000:]
    steps = [event["step"] for event in result.of("committed")]
    assert steps == [*range(1, len(steps) + 1)], "none is lost, and none is made twice"
    trained = by_hand(len(steps))
    for rank in result.records:
        for name, value in result.parameters(rank).items():
            torch.testing.assert_close(value, trained[name], rtol=1e-4, atol=1e-6)
    return result


def by_hand(steps: int) -> dict[str, torch.Tensor]:
    model = noticed.made()
    optimizer = torch.optim.SGD(model.parameters(), lr=noticed.RATE, momentum=0.9)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        for rank in range(RANKS):
            (model(noticed.batch(step, rank, 0)).square().mean() / RANKS).backward()
        optimizer.step()
    return model.state_dict()
