"""Simulated jobs written out, and digests of what happened in them, so that a change of the code shows whether it
changed the protocol.

Seeds would not do: what a seed draws changes with every trouble that is added.  A digest is over what was executed and
what the coordinator heard and told, in their order; when, it does not say.
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
from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.faults import Fault
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.roster import Member
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.simulator import campaign
from recycle_plugin.simulator.checkers import Watcher
from recycle_plugin.simulator.message_delays import Weather
from recycle_plugin.simulator.scenario import Heavy, Scenario, Trouble

FILE = Path(__file__).parents[1] / "pure" / "frozen" / "scenarios.jsonl.gz"
SAID = {  # what was in the messages when they were frozen; not what differs from run to run, nor what the job is
    "Ready": "stepped",
    "CatchUp": "",
    "Serving": "",
    "CaughtUp": "step",
    "StateHash": "step digest",
    "Recorded": "step evaluation committed unknown refused",
    "Restart": "after_s",
    "Serve": "newcomer from_step",
    "SurvivorReport": "generation stepped digest held loaded period_us held_draws",
    "Fingerprint": "step digest tied",
    "Stepped": "generation step",
    "Contribution": "step name values expected",
    "BarrierReached": "generation place values",
    "CheckpointLoaded": "generation",
    "Resized": "generation micro_batches batch full_us",
    "Leaving": "reason",
    "Left": "code",
    "Exited": "code",
    "Heartbeat": "done at what",
    "Missing": "generation what source",
    "SupervisorHeartbeat": "stopped",
    "Terminate": "reason",
    "Fatal": "text",
    "Note": "kind text",
    "Generation": "number members from_step cause",
    "Resume": "generation committed held norm rejected held_draws",
    "Fence": "reason",
    "Committed": "step",
    "Collected": "step name values",
    "BarrierPassed": "place values from_step",
    "End": "step reason failed code",
    "Lease": "for_s",
    "ComputeTime": "step",
    "Over": "code",
}


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
    """Of a run of it.  Raises AssertionError where something was wrong with that."""
    witnesses: list[Witness] = []

    def witness(*arguments: Any) -> Witness:
        witnesses.append(Witness(*arguments))
        return witnesses[0]

    outcome = campaign.run("frozen", given, witness)
    assert not outcome.violations, outcome.violations
    lines = [*witnesses[0].conversation, *(f"{span.seat} {span.instruction}" for span in outcome.spans)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


class Witness(Watcher):
    """Also remembers what was said to the coordinator and by it."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.conversation: list[str] = []

    def heard(self, rank: int, message: object) -> None:
        super().heard(rank, message)
        self.conversation.append(f"{rank}: {_words(message)}")

    def told(self, whom: object, message: object) -> None:
        super().told(whom, message)
        self.conversation.append(_words(message))


def _words(message: object) -> str:
    kind = type(message).__name__
    said = {name: _plain(getattr(message, name)) for name in SAID[kind].split()}
    return f"{kind} {json.dumps(said, sort_keys=True)}"


def _plain(value: Any) -> Any:
    if isinstance(value, tuple) and all(isinstance(each, Member) for each in value):
        return [f"{member.rank}@{member.seat}" for member in value]
    return value


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
