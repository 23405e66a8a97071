"""Mistakes about whose word counts, of when, and how often: what the campaign has to notice where workers are confused.

As tests/mistakes, with a registry of their own, since the jobs are others (``recycle campaign --confused``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from recycle_plugin.core.coordinator import departures, membership, words
from recycle_plugin.core.coordinator.course import Course
from recycle_plugin.core.coordinator.joining import Joining, Phase
from recycle_plugin.core.coordinator.membership import Membership
from recycle_plugin.core.coordinator.regrouping import Regrouping
from recycle_plugin.core.coordinator.words import Speakers
from recycle_plugin.core.messages.contributions import Contributions
from recycle_plugin.core.messages.from_workers import SurvivorReport
from recycle_plugin.core.messages.of_worker import OfWorker
from recycle_plugin.core.vocabulary.causes import Cause
from recycle_plugin.core.vocabulary.roster import Roster, WorkerId
from recycle_plugin.core.worker.control_view import ControlView
from tests.mistakes import Patch

CONFUSED: dict[str, tuple[Patch, int]] = {}


def mistake(name: str, seen: int) -> Callable[[Patch], Patch]:
    """``seen``: a seed that has shown it, with a confused worker; no other is tried."""

    def register(patch: Patch) -> Patch:
        CONFUSED[name] = patch, seen
        return patch

    return register


@mistake("nobody looks at who says something", seen=0)
def whoever_says_it(monkeypatch) -> None:
    monkeypatch.setattr(Speakers, "may_say", lambda self, hello, worker, message: True)


@mistake("a supervisor may speak of any worker", seen=0)
def of_any_worker(monkeypatch) -> None:
    may_say = Speakers.may_say
    monkeypatch.setattr(
        Speakers,
        "may_say",
        lambda self, hello, worker, message: worker is None or may_say(self, hello, worker, message),
    )


@mistake("all processes of a rank are one", seen=6)
def no_incarnations(monkeypatch) -> None:
    monkeypatch.setattr(OfWorker, "worker", property(lambda self: WorkerId(self.rank)))


@mistake("a newcomer may report that it has applied as few steps as it likes", seen=379)
def of_any_step(monkeypatch) -> None:
    of_report = words._of_report

    def lenient(message: SurvivorReport, course: Course) -> str | None:
        least = 0 if course.joining.get(message.worker) is None else course.committed
        return of_report(replace(message, stepped=max(message.stepped, least)), course)

    monkeypatch.setattr(words, "_of_report", lenient)


@mistake("a report of any generation is one of the newest", seen=22)
def of_any_generation(monkeypatch) -> None:
    add = Regrouping.add
    monkeypatch.setattr(Regrouping, "add", lambda self, report: add(self, replace(report, generation=self.generation)))


@mistake("what is said twice counts twice", seen=7)
def counted_twice(monkeypatch) -> None:
    add = Contributions.add

    def added_up(self, message):
        before = self._values.get((message.step, message.name), {}).get(message.shard, {})
        values = {key: value + before.get(key, 0) for key, value in message.values.items()}
        return add(self, replace(message, values=values))

    monkeypatch.setattr(Contributions, "add", added_up)


@mistake("what can't be is taken in", seen=82)
def nobody_is_confused(monkeypatch) -> None:
    heard = lambda message, course: None if course.attendance.is_heard(message) else ""
    monkeypatch.setattr(membership, "objection", heard)


@mistake("who is there and says so again is a stranger", seen=30)
def there_and_turned_away(monkeypatch) -> None:
    enrol = Membership._enrol

    def turned_away(self, ready, now, out):
        if self.started and not self.course.vacancies.is_newcomer(ready.worker):
            self._turn_away(ready.worker, ready.member.host, out)
        else:
            enrol(self, ready, now, out)

    monkeypatch.setattr(Membership, "_enrol", turned_away)


@mistake("a worker takes up a membership that is over", seen=6)
def old_memberships(monkeypatch) -> None:
    monkeypatch.setattr(ControlView, "_is_old", lambda self, message: False)


@mistake("who has replayed a stage enters by any report", seen=712)
def enters_by_any_report(monkeypatch) -> None:
    may_enter = Joining.may_enter
    everybody = Roster(())
    monkeypatch.setattr(
        Joining,
        "may_enter",
        staticmethod(
            lambda newcomer, generation, roster: newcomer.phase is Phase.REPLAYED
            or may_enter(newcomer, generation, everybody)
        ),
    )


@mistake("a step that nobody can be in is kept as where a script is", seen=361)
def kept_as_the_scripts_step(monkeypatch) -> None:
    monkeypatch.setattr(departures, "where_it_can_be", lambda course, message: message)


@mistake("a newcomer that is given up as confused is believed until it is dead", seen=712)
def believed_until_dead(monkeypatch) -> None:
    monkeypatch.setattr(Membership, "_give_up_confused", fenced_only)


def fenced_only(self, worker, why, now, out):
    if self.is_outside(worker):
        self.course.attendance.fence(worker, why, out)
    elif self.ended is None or not self.ended.failed:
        self.course.give_up(worker, Cause.CONFUSED, why, now, out)
