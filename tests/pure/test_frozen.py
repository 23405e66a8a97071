"""Two thousand simulated jobs with failures, written out, end as they did when they were written down.

Seeds would not do: what a seed draws changes with every trouble that is added.  A digest is over the outcome: what was
committed, with which losses, who was given up, and how workers and the job ended; not over the order of events.

Where a change of the protocol is meant to change them, they are written anew, with ``--freeze``, by the commit that
says why.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields, is_dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from recycle_plugin import planner
from recycle_plugin.core.messages.contributions import EACH
from recycle_plugin.core.messages.from_coordinator import Collected, Committed, End, Fence
from recycle_plugin.core.messages.from_workers import Exited, Left
from recycle_plugin.core.messages.typed import read
from recycle_plugin.core.vocabulary.losses import numbers
from recycle_plugin.lab.simulator import campaign, seeded
from recycle_plugin.lab.simulator.checkers import Watcher
from recycle_plugin.lab.simulator.scenario import Scenario
from tests.mistakes.recovering import left_out

COUNT = 2000
FILE = Path(__file__).parent / "frozen" / "scenarios.jsonl.gz"


def plain(value: Any) -> Any:
    """As ``typed.read`` takes it, without what has its default."""
    if is_dataclass(value):
        given = {each: getattr(value, each.name) for each in fields(value)}
        return {each.name: plain(part) for each, part in given.items() if part != each.default}
    return list(map(plain, value)) if isinstance(value, tuple) else value


class Witness(Watcher):
    """Also remembers what came of the job.  Final weights are the reference's, or else the run is a violation."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._steps_seen: set[int] = set()
        self._losses_seen: dict[int, dict[str, float]] = {}
        self._ranks_fenced: set[int] = set()
        self._codes_seen: set[tuple[int, int]] = set()
        self._end_seen: tuple[bool, int] | None = None

    def outcome(self) -> dict[str, Any]:
        """The steps that were committed and their losses, the ranks of which a worker was given up, the exit codes
        of workers by rank, and whether the job failed, with its code.
        """
        return {
            "committed": sorted(self._steps_seen),
            "losses": {step: self._losses_seen[step] for step in sorted(self._steps_seen & self._losses_seen.keys())},
            "given_up": sorted(self._ranks_fenced),
            "codes": sorted(self._codes_seen),
            "end": self._end_seen,
        }

    def heard(self, rank: int, message: object) -> None:
        super().heard(rank, message)
        if isinstance(message, Left | Exited):
            self._codes_seen.add((rank, message.code))

    def told(self, whom: object, message: object) -> None:
        super().told(whom, message)
        match message:
            case Committed(step=step):
                self._steps_seen.add(step)
            case Collected(step=step, name=name, values=values) if name == EACH:
                self._losses_seen[step] = numbers(values)
            case Fence(rank=rank):
                self._ranks_fenced.add(rank)
            case End(failed=failed, code=code):
                self._end_seen = failed, code


def digest(given: Scenario) -> str:
    """Of the outcome of a run of it.  Raises AssertionError if something was wrong with the run."""
    witnesses: list[Witness] = []

    def witness(*arguments: Any) -> Witness:
        witnesses.append(Witness(*arguments))
        return witnesses[0]

    outcome = campaign.run("frozen", given, witness)
    assert not outcome.violations, outcome.violations
    return hashlib.sha256(json.dumps(witnesses[0].outcome(), sort_keys=True).encode()).hexdigest()[:16]


def digests(scenarios: list[Scenario]) -> list[str]:
    """Of each, worked out by two processes."""
    planner.warm()
    with ProcessPoolExecutor(2, get_context("fork")) as pool:  # forked: what is compiled is so in both
        return list(pool.map(digest, scenarios, chunksize=4))


def frozen() -> list[tuple[Scenario, str]]:
    with gzip.open(FILE, "rt") as lines:
        records = list(map(json.loads, lines))
    return [(read(Scenario, record["scenario"], "scenario"), record["digest"]) for record in records]


def freeze(scenarios: list[Scenario]) -> None:
    """Write them down as they run now."""
    records = ({"scenario": plain(given), "digest": now} for given, now in zip(scenarios, digests(scenarios)))
    with gzip.GzipFile(FILE, "wb", mtime=0) as file:  # without the time, so that the same lines give the same file
        file.write("".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records).encode())


def test_what_is_written_down_is_what_was_meant() -> None:
    for seed in range(300):
        given = seeded.scenario(seed)
        assert read(Scenario, json.loads(json.dumps(plain(given))), "scenario") == given


@pytest.mark.timeout(1800)
def test_frozen_jobs_end_as_they_did(request) -> None:
    if request.config.getoption("--freeze"):
        freeze([seeded.scenario(seed) for seed in range(COUNT)])
    records = frozen()
    assert len(records) == COUNT
    chosen = records[:: COUNT // request.config.getoption("--frozen-jobs")]
    found = digests([given for given, _ in chosen])
    differ = [given for (given, then), now in zip(chosen, found) if then != now]
    assert not differ, f"{len(differ)} of {len(chosen)} jobs end otherwise, the first is {differ[0]}"


def test_a_mistake_in_the_protocol_changes_a_digest(monkeypatch) -> None:
    records = frozen()[:40]
    left_out(monkeypatch)
    with pytest.raises(AssertionError):
        assert all(digest(given) == then for given, then in records)
