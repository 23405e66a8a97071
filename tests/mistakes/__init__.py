"""Mistakes in recovery, each to be switched on alone: what the campaign has to notice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain

import pytest

from recycle_plugin.core.coordinator import handlers
from recycle_plugin.core.vocabulary import recovery_plan
from recycle_plugin.core.worker import training_loop
from recycle_plugin.lab.simulator import campaign
from recycle_plugin.lab.simulator.scenario import Scenario
from recycle_plugin.planner.recovery import Recovery

Patch = Callable[[pytest.MonkeyPatch], None]


class Mistakes(dict[str, Patch]):
    """What switches each on, by its name; ``seen``: a seed whose scenario shows it (:meth:`shown_by`).

    ``also``: another mistake, without which this one would be found sooner.
    """

    def __init__(self) -> None:
        self.seen: dict[str, int] = {}

    def mistake(self, name: str, seen: int = 0) -> Callable[[Patch], Patch]:
        def register(patch: Patch) -> Patch:
            self[name], self.seen[name] = patch, seen
            return patch

        return register

    def instead(
        self, name: str, owner: object, attribute: str, seen: int = 0, also: Patch = lambda _: None
    ) -> Callable:
        def register(wrong):
            self.mistake(name, seen)(lambda patch: (also(patch), put(patch, owner, attribute, wrong)))
            return wrong

        return register

    def around(self, name: str, owner: object, method: str, seen: int = 0, also: Patch = lambda _: None) -> Callable:
        def register(change):
            self.mistake(name, seen)(lambda patch: (also(patch), changed(patch, owner, method, change)))
            return change

        return register

    def shown_by(
        self, name: str, monkeypatch: pytest.MonkeyPatch, scenario: Callable[[int], Scenario]
    ) -> tuple[Scenario, list[str]]:
        """Return a scenario that shows the mistake, and its violations: that of the seed ``seen``, or that with other
        delays: once jobs send other messages, none of them is as late as it was. Then those of other seeds.
        """
        known = scenario(self.seen[name])
        later = (replace(known, torn=known.torn + 100_000 * number) for number in range(VARIED))
        with monkeypatch.context() as patch:
            self[name](patch)
            for job in chain(later, map(scenario, range(FOUND_WITHIN))):
                if said := list(campaign.run("x", job).violations):
                    return job, said
        raise AssertionError(f"no job shows the mistake: {name}")


VARIED, FOUND_WITHIN = 60, 300
MISTAKES = Mistakes()
mistake, instead, around = MISTAKES.mistake, MISTAKES.instead, MISTAKES.around


def put(monkeypatch, owner: object, name: str, wrong: Callable) -> None:
    """``wrong`` takes the place of an attribute, and of what is done with a message."""
    before = getattr(owner, name)
    monkeypatch.setattr(owner, name, wrong)
    for table in (handlers.OF_MEMBERS, handlers.OF_NEWCOMERS, handlers.OF_ALL):
        for kind in [kind for kind, handler in table.items() if handler is before]:
            monkeypatch.setitem(table, kind, wrong)


def changed(monkeypatch, owner: object, name: str, change: Callable) -> None:
    """``change(self, before, …)`` takes the place of a method, or of a function."""
    before = getattr(owner, name)
    put(monkeypatch, owner, name, lambda self, *given, **named: change(self, before, *given, **named))


def changed_recovery_plans(monkeypatch, change: Callable[[Recovery], Recovery]) -> None:
    """Every worker works out other rests of the unfinished steps."""
    monkeypatch.setattr(
        training_loop, "unfinished", lambda *given: tuple(map(change, recovery_plan.unfinished(*given)))
    )


def changed_holdings(monkeypatch, keeps: Callable[[object], bool]) -> None:
    def unfinished(recover, committed, held, *more):
        return recovery_plan.unfinished(
            recover, committed, {seat: frozenset(filter(keeps, have)) for seat, have in held.items()}, *more
        )

    monkeypatch.setattr(training_loop, "unfinished", unfinished)
