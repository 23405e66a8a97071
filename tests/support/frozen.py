"""Simulated jobs written out, and digests of what came of them, so that a change of the code shows whether it
changed the protocol.

Seeds would not do: what a seed draws changes with every trouble that is added.  A digest is over the outcome: what was
committed, with which losses, who was given up, and how workers and the job ended; not over the order of events.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from recycle_plugin import planner
from recycle_plugin.core.messages.contributions import LOSS
from recycle_plugin.core.messages.from_coordinator import Collected, Committed, End, Fence
from recycle_plugin.core.messages.from_workers import Exited, Left
from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.faults import Fault
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.lab.simulator import campaign
from recycle_plugin.lab.simulator.checkers import Watcher
from recycle_plugin.lab.simulator.message_delays import Weather
from recycle_plugin.lab.simulator.scenario import Heavy, Scenario, Trouble

FILE = Path(__file__).parents[1] / "pure" / "frozen" / "scenarios.jsonl.gz"


def write(given: Scenario) -> dict:
    """A scenario as JSON, without what has its default."""
    default = Scenario(given.shape, given.costs, given.policy, given.steps)
    record = {
        name: value
        for name, value in asdict(given).items()
        if getattr(given, name) != getattr(default, name) or name in ("shape", "costs", "policy", "steps")
    }
    record["policy"] = {name: value for name, value in record["policy"].items() if value != getattr(Policy(), name)}
    record["costs"] = {name: value for name, value in record["costs"].items() if value}
    return record | ({"faults": list(map(str, given.faults))} if given.faults else {})


def read(record: dict) -> Scenario:
    """Inverse of :func:`write`."""
    shape, costs, policy = (dict(record[name]) for name in ("shape", "costs", "policy"))
    kinds = {
        "troubles": _troubles,
        "between": _tuples,
        "lengths": _tuples,
        "full": _tuples,
        "log_full": _tuples,
        "log_choices": _tuples,
        "faults": lambda texts: tuple(map(Fault.parse, texts)),
        "weather": _weather,
        "heavy": lambda records: tuple(Heavy(**record) for record in records),
    }
    given = {name: kinds[name](value) if name in kinds else value for name, value in record.items()}
    given |= {
        "shape": Topology(**_tuples(shape)),
        "costs": CostModel(**_tuples(costs)),
        "policy": Policy(**_tuples(policy)),
    }
    return Scenario(**given)


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _tuples(each) for name, each in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _troubles(records: list[dict]) -> tuple[Trouble, ...]:
    return tuple(
        Trouble(
            **record
            | {
                "seats": tuple(Seat(*seat) for seat in record["seats"]),
                "peer": Seat(*record["peer"]) if record["peer"] else None,
            }
        )
        for record in records
    )


def _weather(record: dict) -> Weather:
    return Weather(**_tuples(record))


def digest(given: Scenario) -> str:
    """Of the outcome of a run of it.  Raises AssertionError if something was wrong with the run."""
    witnesses: list[Witness] = []

    def witness(*arguments: Any) -> Witness:
        witnesses.append(Witness(*arguments))
        return witnesses[0]

    outcome = campaign.run("frozen", given, witness)
    assert not outcome.violations, outcome.violations
    return hashlib.sha256(json.dumps(witnesses[0].outcome(), sort_keys=True).encode()).hexdigest()[:16]


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
            case Collected(step=step, name=name, values=values) if name == LOSS:
                self._losses_seen[step] = values
            case Fence(rank=rank):
                self._ranks_fenced.add(rank)
            case End(failed=failed, code=code):
                self._end_seen = failed, code


def frozen() -> list[dict]:
    """Each with its ``scenario`` and its ``digest``."""
    with gzip.open(FILE, "rt") as lines:
        return [json.loads(line) for line in lines]


def freeze(scenarios: list[Scenario]) -> None:
    """Write them down as they run now."""
    FILE.parent.mkdir(exist_ok=True)
    records = ({"scenario": write(given), "digest": now} for given, now in zip(scenarios, digests(scenarios)))
    with gzip.GzipFile(FILE, "wb", mtime=0) as file:  # without the time, so that the same lines give the same file
        file.write("".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records).encode())


def digests(scenarios: list[Scenario]) -> list[str]:
    """Of each, worked out by two processes."""
    planner.warm()
    with ProcessPoolExecutor(2, get_context("fork")) as pool:  # forked: what is compiled is so in both
        return list(pool.map(digest, scenarios, chunksize=4))
