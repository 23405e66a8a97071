"""Mistakes about whose word counts, of when, and how often: what the campaign has to notice where workers are confused.

As tests/mistakes, with a registry of their own, since the jobs are others (``recycle campaign --confused``).
"""

from __future__ import annotations

from dataclasses import replace

from recycle_plugin.core.coordinator import handlers, losses, starting
from recycle_plugin.core.coordinator.facts.joining import Joining, Phase
from recycle_plugin.core.coordinator.facts.regrouping import Regrouping
from recycle_plugin.core.coordinator.words import Speakers
from recycle_plugin.core.messages.contributions import Contributions
from recycle_plugin.core.messages.said import OfWorker
from recycle_plugin.core.vocabulary.causes import Cause
from recycle_plugin.core.vocabulary.roster import Roster, WorkerId
from recycle_plugin.core.worker.control_view import ControlView
from tests.mistakes import Mistakes

CONFUSED = Mistakes()
mistake, instead, around = CONFUSED.mistake, CONFUSED.instead, CONFUSED.around


instead("nobody looks at who says something", Speakers, "may_say", seen=0)(lambda self, hello, worker, message: True)
around("a supervisor may speak of any worker", Speakers, "may_say", seen=0)(
    lambda self, before, hello, worker, message: worker is None or before(self, hello, worker, message)
)
instead("all processes of a rank are one", OfWorker, "worker", seen=6)(property(lambda self: WorkerId(self.rank)))


around("a report of any generation is one of the newest", Regrouping, "add", seen=26)(
    lambda self, before, report: before(self, replace(report, generation=self.generation))
)


@mistake("what is said twice counts twice", seen=7)
def counted_twice(monkeypatch) -> None:
    add = Contributions.add

    def added_up(self, message):
        before = self._values.get((message.step, message.name), {}).get(message.shard, {})
        values = {key: value + before.get(key, 0) for key, value in message.values.items()}
        return add(self, replace(message, values=values))

    monkeypatch.setattr(Contributions, "add", added_up)


instead("losses stay of what others compute again from data of their own", Contributions, "lose", seen=26)(
    lambda self, step, kept: None
)


@mistake("what can't be is taken in", seen=82)
def nobody_is_confused(monkeypatch) -> None:
    heard = lambda message, state: None if state.attendance.is_heard(message) else ""
    monkeypatch.setattr(handlers, "objection", heard)


@around("who is there and says so again is a stranger", starting, "ready", seen=30)
def there_and_turned_away(state, before, ready):
    if state.attendance.started and not state.vacancies.is_newcomer(ready.worker):
        starting.turn_away(state, ready.worker, ready.member.host)
    else:
        before(state, ready)


instead("a worker takes up a membership that is over", ControlView, "_is_old", seen=9)(lambda self, message: False)


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


@instead("a newcomer that is given up as confused is believed until it is dead", losses, "give_up_confused", seen=712)
def fenced_only(state, worker, why):
    if state.vacancies.is_outside(worker):
        state.fence(worker, why)
    elif not state.ending.failed:
        losses.give_up(state, worker, Cause.CONFUSED, why)
