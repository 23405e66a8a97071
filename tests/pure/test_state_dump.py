"""The coordinator's state, written down and read again: nothing of it is forgotten, and what can't be written down says
so.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from enum import Enum
from hashlib import sha256
from math import inf, nan
from typing import Any

import pytest

from recycle_plugin.core.coordinator import state_dump as module
from recycle_plugin.core.coordinator.facts.failure_detector import FailureDetector
from recycle_plugin.core.coordinator.facts.step_ledger import StepLedger
from recycle_plugin.core.coordinator.state_dump import dump, load
from recycle_plugin.core.messages.activity import WAITS, Activity
from recycle_plugin.core.messages.encoding import encode
from recycle_plugin.core.messages.from_workers import Heartbeat, Missing
from recycle_plugin.core.vocabulary.deadlines import Deadlines
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.roster import FailureDomain, Roster, WorkerId
from recycle_plugin.lab.simulator import campaign, coordination, seeded
from tests.support.membership import computes, member, started, step

SEEDS = (2, 5, 14, 29)  # kills, ties, rejections, a leave


def again(thing: Any) -> Any:
    return load(json.loads(json.dumps(dump(thing), allow_nan=False)))


def attributes(thing: Any, seen: set) -> Iterator[tuple[str, Any]]:
    """(class and name, value) of all that is in ``thing``, however deep, by a search of its own."""
    if id(thing) in seen or isinstance(thing, Enum):
        return
    seen.add(id(thing))
    if isinstance(thing, dict):
        for part in (*thing.keys(), *thing.values()):
            yield from attributes(part, seen)
    elif isinstance(thing, (list, tuple, set, frozenset, deque)):
        for part in thing:
            yield from attributes(part, seen)
    for name, value in getattr(thing, "__dict__", {}).items():
        yield f"{type(thing).__name__}.{name}", value
        yield from attributes(value, seen)


@pytest.mark.parametrize(
    "thing",
    [
        None,
        True,
        1,
        1.0,
        -inf,
        "x",
        (),
        (1, (2.5, "x")),
        [1, [2]],
        set(),
        {3, 1, 2},
        frozenset({Seat(1, 2), Seat(0, 1)}),
        {},
        {1: "x", "1": 2, (1, "y"): [3]},
        {"tuple": [1]},
        deque([1.0, 2.0], maxlen=3),
        Seat(1, 2),
        WorkerId(3, 1),
        FailureDomain.REPLICA,
        member(2),
        Roster((member(1), member(0))),
        Heartbeat(1, 2, 3, Activity(WAITS, ""), incarnation=4),
        computes("1SA0.2>0.2@3"),
        FailureDetector(Deadlines(), inf, 4, 3.0),
    ],
    ids=repr,
)
def test_what_is_read_is_what_was_written(thing):
    read = again(thing)
    assert read == thing and type(read) is type(thing)
    assert not isinstance(thing, deque) or read.maxlen == thing.maxlen


def test_order_and_kind_survive():
    given = {2: nan, 1: [True, 1, 1.0]}
    read = again(given)
    assert list(read) == [2, 1] and read[2] != read[2] and [type(one) for one in read[1]] == [bool, int, float]
    assert dump({"b", "a", "c"}) == dump({"c", "b", "a"}) == {"set": ["a", "b", "c"]}


def test_nothing_of_a_membership_is_forgotten():
    """Also what a class gets later: attributes are found by looking."""
    membership = started(clipping=1.0)
    step(membership, 0, 1)
    membership.receive(Heartbeat(1, 2, 3, computes("1F0.0@2")), 1.0)
    membership.receive(Missing(1, 0, "x", "0.0"), 1.0)
    membership.tick(1.5)
    membership.state.steps.newly_added = {WorkerId(1): deque([1, 2])}
    made = {
        name: json.dumps(dump(value))
        for name, value in attributes(membership, set())
        if not (name.startswith("Roster.") and name != "Roster.members")
        and name not in ("Generation.roster", "Heartbeat.worker")
    }
    read = {name: json.dumps(dump(value)) for name, value in attributes(again(membership), set())}
    assert made == {name: value for name, value in read.items() if name in made} and len(made) > 60
    assert made.keys() == read.keys() and "StepLedger.newly_added" in made and "Throughput._period_us" in made


def test_what_is_worked_out_again_is_not_written_down():
    roster = Roster((member(0), member(1)))
    before = json.dumps(dump(roster))
    assert roster.first and roster.stage(0) and roster.addresses and json.dumps(dump(roster)) == before


@pytest.mark.parametrize(
    "value, said",
    [(iter(()), "tuple_iterator"), (lambda: 0, "function"), (object(), "object"), (sys, "module")],
    ids=("iterator", "function", "object", "module"),
)
def test_what_cannot_be_written_down_is_named(value, said):
    membership = started()
    membership.state.steps.figures.odd = [value]
    with pytest.raises(
        TypeError,
        match=rf"Membership\.state\.steps\.figures\.odd\[0\] is a {said}, and nobody knows how to write that down",
    ):
        dump(membership)


def test_what_two_share_is_named():
    membership = started()
    membership.state.barriers.also = membership.state.steps
    with pytest.raises(
        TypeError,
        match=r"Membership\.state\.steps and Membership\.state\.barriers\.also are one object, and would be two",
    ):
        dump(membership)


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"a": 1, "b": 2},
        {"coordinator.step_ledger.Nobody": {}},
        {"coordinator.nowhere.StepLedger": {}},
        {"posix.system": "true"},
        {"coordinator.ends.end": "os"},
    ],
    ids=str,
)
def test_a_record_of_something_else_is_refused(record):
    with pytest.raises(ValueError, match="no dumped state"):
        load(record)


# --- in the campaign ------------------------------------------------------------------------------------


def digest(monkeypatch, seed: int, reloads: float) -> tuple[str, int]:
    """Of everything that happens in a run: executed instructions, messages, events; and how often the state was read
    again.
    """
    found, act, again_ = sha256(), coordination.Coordination._act, []
    with monkeypatch.context() as patched:
        patched.setattr(
            coordination.Coordination,
            "_act",
            lambda self, output, *more, **named: (
                [
                    found.update(f"{self._cluster.now} {whom} ".encode() + encode(message))
                    for whom, message in output.messages
                ],
                act(self, output, *more, **named),
            ),
        )
        patched.setattr(coordination, "load", lambda record: (again_.append(1), load(record))[1])
        outcome = campaign.run("x", replace(seeded.scenario(seed), reloads=reloads))
    found.update(repr((outcome.violations, outcome.spans, outcome.story)).encode())
    return found.hexdigest(), len(again_)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_is_the_same_however_often_the_state_is_read_again(seed, monkeypatch):
    (without, never), (often, times) = (digest(monkeypatch, seed, reloads) for reloads in (0.0, 0.1))
    assert without == often and never == 0 and times > 100


@pytest.mark.parametrize("forgotten", ["_applied", "_contributions"])
def test_a_field_that_is_forgotten_shows(forgotten, monkeypatch):
    """A negative control of the one before."""
    found = module._attributes
    fresh = vars(StepLedger())[forgotten]
    monkeypatch.setattr(
        module,
        "_attributes",
        lambda thing: ((name, fresh if name == forgotten else value) for name, value in found(thing)),
    )
    assert any(digest(monkeypatch, seed, 0.1)[0] != digest(monkeypatch, seed, 0.0)[0] for seed in SEEDS)
