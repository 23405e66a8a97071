"""Failure traces: when how many workers are there. Times in seconds."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.lab.simulator.history import MembershipChange
from recycle_plugin.lab.simulator.peers import published

HOUR_S = 3600.0
GCP = "|".join([*(f"{hour} {gpus}" for hour, gpus in published.TRACE), f"{published.TRACE_ENDS_H} end"])
"""The trace of ReCycle's evaluation, in the format of a file."""


def read(name: str, workers: int) -> tuple[list[MembershipChange], float | None]:
    """Return the changes of the trace ``gcp`` or of a file, and its end in seconds if it names one. A file has entries
    ``hour workers``, ``hour lost 1.2,0.3`` (these seats) or ``hour end``, one a line or separated by ``|``; or JSON
    rows [hour, workers], alone or under the key "gpus". ValueError for anything else, and OSError.
    """
    text = GCP if name == "gcp" else Path(name).read_text()
    try:
        entries = (
            _json(text)
            if text.lstrip()[:1] in ("{", "[")
            else [entry.split() for line in text.splitlines() for entry in line.partition("#")[0].split("|")]
        )
        return _changes([entry for entry in entries if entry], workers)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"trace {name}: {error}") from None


def regular(
    every_s: float, length_s: float, return_s: float | None = None, seed: int | None = None
) -> list[MembershipChange]:
    """Return changes that lose one worker every ``every_s`` seconds (``seed``: exponential with that mean); each comes
    back after ``return_s``, or never. ValueError if ``every_s`` is not above 0.
    """
    if every_s <= 0:
        raise ValueError(f"a worker lost every {every_s:g} s: more than 0")
    dice = random.Random(seed)
    changes, now = [], 0.0
    while (now := now + (every_s if seed is None else dice.expovariate(1 / every_s))) < length_s:
        changes.append(MembershipChange(now, lost=1))
        if return_s is not None:
            changes.append(MembershipChange(now + return_s, joined=1))
    return changes


def _json(text: str) -> list[list[str]]:
    found = json.loads(text)
    rows = found["gpus"] if isinstance(found, dict) else found
    return [[str(max(0.0, float(hour))), str(round(float(workers)))] for hour, workers in rows]


def _changes(entries: Sequence[Sequence[str]], workers: int) -> tuple[list[MembershipChange], float | None]:
    changes: list[MembershipChange] = []
    there, before, end = None, -1.0, None
    for entry in entries:
        at = float(entry[0]) * HOUR_S
        if at < before:
            raise ValueError(f"{' '.join(entry)}: hours have to rise")
        before = at
        if entry[1:] == ["end"]:
            end = at
        elif len(entry) == 3 and entry[1] == "lost":
            changes.append(MembershipChange(at, seats=tuple(map(Seat.parse, entry[2].split(",")))))
        elif len(entry) == 2:
            changes += _step(at, there, int(entry[1]), workers)
            there = int(entry[1])
        else:
            raise ValueError(f"{' '.join(entry)!r}: write 'hour workers', 'hour lost 1.2,0.3' or 'hour end'")
    return changes, end


def _step(at: float, there: int | None, now: int, workers: int) -> Iterator[MembershipChange]:
    if not 0 < now <= workers:
        raise ValueError(f"{now} workers at hour {at / HOUR_S:g}: the job has 1 to {workers}")
    before = workers if there is None else there
    if now < before:
        yield MembershipChange(at, lost=before - now)
    elif now > before:
        yield MembershipChange(at, joined=now - before)
