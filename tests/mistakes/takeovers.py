"""Mistakes in who takes the coordinator's place, and with what.

As tests/mistakes; found in jobs in which coordinators die, or are cut off.
"""

from __future__ import annotations

from dataclasses import replace

from recycle_plugin.core.coordinator import mirror
from recycle_plugin.core.coordinator.exchange import Exchange
from recycle_plugin.core.coordinator.mirror import Known, Mirror
from recycle_plugin.core.coordinator.succession import Electorate, Succession
from recycle_plugin.core.coordinator.switchboard import Switchboard
from recycle_plugin.core.messages.kept import Kept
from recycle_plugin.core.messages.line_end import LineEnd, Tries
from recycle_plugin.core.messages.mirroring import Turns
from tests.mistakes import Mistakes, changed

TAKEOVERS = Mistakes()
mistake, instead, around = TAKEOVERS.mistake, TAKEOVERS.instead, TAKEOVERS.around


# --- who may lead -------------------------------------------------------------------------------------


@around("who stands by leads with half of the workers", Electorate, "gives")
def half_is_enough(self, before, workers, more):
    return before(self, workers, False)


@around("who stands by leads with one worker", Electorate, "gives")
def one_is_enough(self, before, workers, more):
    return bool(workers) if more else before(self, workers, more)


instead("a coordinator goes on although nobody knows that it does so alone", Mirror, "_is_agreed")(lambda self: True)


@around("who stood by in an earlier term may lead", Switchboard, "known")
def any_term(self, before, hello):
    line = self.lines.get(hello.line)
    return line if line is not None and hello.token == line.hello.token else None


@around("who has turned comes home again", Tries, "are_over")
def comes_home(self, before, answer):
    return answer is not None


@around("the next coordinator's term may be that of the one before", Succession, "moves")
def same_term(self, before, host):
    term = self.term
    before(self, host)
    self.term = term


@around("who may vote is asked of the newest membership alone", Electorate, "add")
def newest_alone(self, before, news, roster):
    before(self, news, roster)
    while len(self._since) > 1:
        self._since.popleft()


@instead("who goes on at home does not ask whether others turn elsewhere", Exchange, "_follows")
def asks_nobody(self) -> None:
    return None


# --- what it knows ------------------------------------------------------------------------------------


instead("what follows goes out before who stands by knows", Mirror, "_may_go")(lambda self, news: self._is_agreed())


@around("what who stands by elsewhere has is not waited for", Mirror, "_may_go")
def not_elsewhere(self, before, news):
    away = [each for each in self._followers if each.address]
    self._followers = [each for each in self._followers if not each.address]
    try:
        return before(self, news)
    finally:
        self._followers += away


@around("who stands by leaves out what nobody waits for", Known, "take")
def leaves_out(self, before, message):
    if message.waits or message.kind != "said":
        before(self, message)
    else:
        self.count += 1


@instead("the guard is not told that nobody is in step", mirror.Mirror, "let_go")
def untold(self, follower) -> None:
    if follower in self._followers:
        self._followers.remove(follower)
        follower.control.close()
        if follower.in_step and follower.address:
            self.go_on_alone()
        self._let_out()


# --- connections that go on ---------------------------------------------------------------------------


instead("what was under way is not sent again", Kept, "since")(lambda self, count: [])


@around("what has come is sent again", Kept, "since")
def once_more(self, before, count):
    return before(self, max(self.dropped, count - 1))


@around("an end does not know how much it has heard", LineEnd, "_again")
def nothing_heard(self, before, hello):
    return replace(before(self, hello), heard=self._kept.dropped)


@around("who hangs up since it hears nothing is dead", Exchange, "_said")
def dead(self, before, line, message):
    if not isinstance(message, Turns):
        before(self, line, message)


@mistake("others are given up while nothing gets out")
def given_up(monkeypatch) -> None:
    monkeypatch.setattr(Mirror, "holds_up", property(lambda self: False))


@around("a term that begins alone is told to those alone that were answered", Exchange, "_release")
def answered_alone(self, before, effects, to=None):
    before(self, effects)


@around("one that stands by may be in step before it has all", Mirror, "_nears")
def too_early(self, before, follower):
    follower.mark = follower.taken
    follower.awaited = follower.near = True
    before(self, follower)


@mistake("one that is stuck elsewhere is waited for")
def stuck(monkeypatch) -> None:
    changed(monkeypatch, Mirror, "see_late", lambda self, before: None)
