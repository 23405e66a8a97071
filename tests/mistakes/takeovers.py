"""Mistakes in who takes the coordinator's place, and with what.

As tests/mistakes; found in jobs in which coordinators die, or are cut off.  That a process counts as in step before it
has all that went out is harmless here: lines carry what was sent before a process died.  tests/runtime/test_mirror.py
has that rule.
"""

from __future__ import annotations

from dataclasses import replace

from recycle_plugin.core.coordinator import stalls
from recycle_plugin.core.coordinator.exchange import Exchange
from recycle_plugin.core.coordinator.mirror import Known, Mirror, Turned
from recycle_plugin.core.coordinator.succession import Electorate
from recycle_plugin.core.messages.kept import Kept
from recycle_plugin.core.messages.line_end import LineEnd, Tries
from recycle_plugin.core.messages.mirroring import Turns
from recycle_plugin.core.vocabulary.roster import Roster
from tests.mistakes import Mistakes, changed

TAKEOVERS = Mistakes()
mistake, instead, around = TAKEOVERS.mistake, TAKEOVERS.instead, TAKEOVERS.around


# --- who may lead -------------------------------------------------------------------------------------


@around("who stands by leads with half of the workers", Electorate, "gives", seen=12)
def half_is_enough(self, before, workers, more):
    return before(self, workers, False)


@around("who stands by leads with one worker", Electorate, "gives", seen=12)
def one_is_enough(self, before, workers, more):
    return bool(workers) if more else before(self, workers, more)


instead("a coordinator goes on although nobody knows that it does so alone", Mirror, "_is_agreed", seen=13)(
    lambda self: True
)


@around("the newest membership alone decides", Electorate, "gives", seen=9)
def newest_alone(self, before, workers, more):
    newest = Electorate()
    newest.add(*self._since[-1])
    return before(newest, workers, more)


instead("a worker whose turn has come through goes home again", Tries, "are_over", seen=579)(
    lambda self, answer: answer is not None
)


instead("nobody that has turned in vain is sent back", Turned, "send_back", seen=4356)(
    lambda self, control, known: False
)


# --- what it knows ------------------------------------------------------------------------------------


instead("what follows goes out before who stands by knows", Mirror, "_may_go", seen=15)(
    lambda self, news: self._is_agreed()
)


@around("what who stands by elsewhere has is not waited for", Mirror, "_may_go", seen=9)
def not_elsewhere(self, before, news):
    away = [each for each in self._followers if each.address]
    self._followers = [each for each in self._followers if not each.address]
    try:
        return before(self, news)
    finally:
        self._followers += away


@around("who stands by leaves out what nobody waits for", Known, "take", seen=4)
def leaves_out(self, before, message):
    if message.waits or message.kind != "said":
        before(self, message)
    else:
        self.count += 1


# --- connections that go on ---------------------------------------------------------------------------


instead("what was under way is not sent again", Kept, "since", seen=1)(lambda self, count: [])


@around("what has come is sent again", Kept, "since", seen=0)
def once_more(self, before, count):
    return before(self, max(self.dropped, count - 1))


@around("an end does not know how much it has heard", LineEnd, "_again", seen=1)
def nothing_heard(self, before, hello):
    return replace(before(self, hello), heard=self._kept.dropped)


@around("who hangs up since it hears nothing is dead", Exchange, "_said", seen=1)
def dead(self, before, line, message):
    if not isinstance(message, Turns):
        before(self, line, message)


@mistake("others are given up while nothing gets out", seen=220)
def given_up(monkeypatch) -> None:
    monkeypatch.setattr(Mirror, "holds_up", property(lambda self: False))
    monkeypatch.setattr(stalls, "_unless_deaf", lambda state, suspicions: suspicions)  # which saves most of them


@around("whose connection is reset is dead", Exchange, "_broken", seen=8)
def reset_is_dead(self, before, line, control, reset=False):
    before(self, line, control)


@around("a term that begins alone is told to those alone that were answered", Exchange, "_release", seen=1)
def answered_alone(self, before, effects, to=None):
    before(self, effects)


@mistake("one that is stuck elsewhere is waited for", seen=1)
def stuck(monkeypatch) -> None:
    changed(monkeypatch, Mirror, "see_late", lambda self, before: None)


instead("most of the others are given up for their silence at once", stalls, "_unless_deaf", seen=1025)(
    lambda state, suspicions: suspicions
)


@around("the ends of the pipeline do not hear where the other end is", Roster, "beside", seen=38)
def other_end(self, before, stage, shard):
    return tuple(member for member in before(self, stage, shard) if abs(member.seat.stage - stage) <= 1)
