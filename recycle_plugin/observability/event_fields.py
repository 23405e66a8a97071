"""Fields of the events that a run's history needs, and their valid values; checked once, when a log is read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from math import isfinite
from typing import Any

from recycle_plugin.core.vocabulary.ids import Seat

LARGEST = 2**53  # largest count, of steps for instance: above it floats skip integers
LATEST = 1e11  # seconds since the epoch; years have four digits until then
OTHER = "it was written by another release"
ABSENT = object()

Check = Callable[[Any], bool]


count: Check = lambda value: type(value) is int and 0 <= value <= LARGEST
positive: Check = lambda value: count(value) and value != 0
number: Check = lambda value: isfinite(value) if type(value) is float else type(value) is int and abs(value) <= LARGEST
moment: Check = lambda value: number(value) and 0 <= value < LATEST  # seconds since the epoch
loss: Check = lambda value: value is None or type(value) is float or number(value)  # may be infinite or NaN
text: Check = lambda value: isinstance(value, str)
texts: Check = lambda value: isinstance(value, list) and all(map(text, value))
rank: Check = lambda value: value is None or count(value)  # None: no worker's
yes_or_no: Check = lambda value: isinstance(value, bool)


def seats(value: object) -> bool:
    """Return whether ``value`` is {seat's name: rank}."""
    try:
        return isinstance(value, dict) and all(Seat.parse(name) and count(rank) for name, rank in value.items())
    except ValueError:
        return False


def others(value: object) -> bool:
    """Return whether ``value`` is {seat's name: its ranks, without the first}."""
    return isinstance(value, dict) and all(
        isinstance(ranks, list) and all(map(count, ranks)) for ranks in value.values()
    )


FIELDS: Mapping[str, Mapping[str, Check]] = {
    "start": {
        "job.replicas": positive,
        "job.stages": positive,
        "job.micro_batches": positive,
        "job.batch": positive,
        "seats": seats,
    },
    "worker": {"rank": count, "pid": count},
    "committed": {"step": count},
    "loss": {"step": count, "loss": loss},
    "loaded": {"step": count},
    "fault": {"seat": text, "fault": text, "struck_at": moment},
    "lost": {"seat": text, "rank": count, "how": text, "seen_at": moment},
    "confirmed": {"rank": count, "how": text},
    "deposed": {"host": text},
    "resume": {"committed": count, "throughput": number},
    "behind": {"rank": count, "step": count, "left": count},
    "catching_up": {"rank": count, "share": number, "bytes": count, "bytes_per_s": number},
    "restart": {"rank": count},
    "newcomer": {"rank": count},
    "caught_up": {"rank": count, "bytes": count, "followed_bytes": count},
    "restored": {"rank": count, "seat": text, "step": count, "bytes": count, "seconds": number},
    "replayed": {"rank": count, "seat": text, "step": count, "steps": count, "bytes": count},
    "rejoined": {"rank": count, "seat": text, "step": count},
    "leaving": {"seat": text, "rank": count, "why": text},
    "left": {"rank": count},
    "slow_replica": {"replica": count, "rank": rank, "behind_us": count, "over": yes_or_no},
    "batch": {"step": count, "batch": positive, "micro_batches": positive},
    "stage": {"stage": count, "layers": texts, "parameters": count, "precision": text},
    "checkpoint": {"path": text},
    "metrics": {"url": text},
    "end": {"text": text},
    "finished": {"text": text},
}
"""Required fields by kind of event; dots lead to nested fields."""
SHRUNK: Mapping[str, Check] = {"contributed": lambda value: isinstance(value, list), "replicas": positive}
"""Further fields of the commit of a step to which some replicas have not contributed."""
COORDINATOR: Mapping[str, Check] = {
    "coordinator.host": text,
    "coordinator.pid": positive,
    "coordinator.stop": positive,
    "coordinator.place": text,
}
"""Further fields of a start event that has a coordinator."""


def check(events: Iterable[Mapping[str, Any]], start: Mapping[str, Any]) -> None:
    """Raise ValueError naming the first missing or invalid field; ``start``: the job's start event."""
    _check(start, {**FIELDS["start"], **(COORDINATOR if start.get("coordinator") else {})})
    if "others" in start:
        _check(start, {"others": others})
    ranks = {*start["seats"].values(), *(rank for ranks in start.get("others", {}).values() for rank in ranks)}
    for event in events:
        shrunk = event["event"] == "committed" and "contributed" in event
        _check(event, {"time": moment, **FIELDS.get(event["event"], {}), **(SHRUNK if shrunk else {})})
        _check_member(event, start["seats"], ranks)


def _check(event: Mapping[str, Any], fields: Mapping[str, Check]) -> None:
    for name, fits in fields.items():
        value: Any = event
        for part in name.split("."):
            value = value.get(part, ABSENT) if isinstance(value, dict) else ABSENT
        if value is ABSENT:
            raise ValueError(f"its {event['event']} event has no {name}: {OTHER}")
        if not fits(value):
            raise ValueError(f"its {event['event']} event has {str(value)[:60]!r} as {name}: {OTHER}")


def _check_member(event: Mapping[str, Any], seats: Collection[str], ranks: Collection[int]) -> None:
    """Raise ValueError if a worker that is lost, leaves or returns is not one of the job's."""
    if event["event"] in ("lost", "leaving", "restored", "replayed", "rejoined") and event["seat"] not in seats:
        raise ValueError(f"its {event['event']} event names seat {event['seat']}, which is not in its start event")
    if event["event"] == "left" and event["rank"] not in ranks:
        raise ValueError(f"its left event names rank {event['rank']}, which is not in its start event")
