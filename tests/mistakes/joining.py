"""Mistakes about workers that come back.

As tests/mistakes.  What gives a newcomer a wrong state is planted together with a coordinator that takes every
hash for equal: else the comparison finds it, and nothing wrong gets in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from recycle_plugin.core.coordinator import generations, returns
from recycle_plugin.core.coordinator.facts.boards import Boards
from recycle_plugin.core.coordinator.facts.joining import Joining
from recycle_plugin.core.coordinator.facts.output import CoordinatorOutput
from recycle_plugin.core.coordinator.facts.places import Places, Unfinished
from recycle_plugin.core.messages.from_workers import ALWAYS
from recycle_plugin.core.vocabulary.state_stream import Unit
from recycle_plugin.core.worker.catching_up import CatchingUp
from recycle_plugin.core.worker.filled_stage import FilledStage
from recycle_plugin.core.worker.iterator_data import IteratorData
from recycle_plugin.core.worker.newcomer import Newcomer
from recycle_plugin.core.worker.serving import Service, Servings
from recycle_plugin.core.worker.worker import Worker
from recycle_plugin.lab.simulator.simulated_state import SimulatedLine, SimulatedState
from recycle_plugin.lab.simulator.simulated_worker import SimulatedMachine
from tests.mistakes import around, changed, instead, mistake


def all_hashes_are_equal(monkeypatch) -> None:
    changed(
        monkeypatch,
        Joining,
        "add_hash",
        lambda self, before, message, stage: before(self, replace(message, digest="equal"), stage),
    )


def wrong_weights(monkeypatch) -> None:
    def send(self, before, item):
        before(self, replace(item, value=item.value + 1) if getattr(item, "name", "") == "weight" else item)

    changed(monkeypatch, SimulatedLine, "send", send)


def not_asked_again(monkeypatch) -> None:
    all_hashes_are_equal(monkeypatch)
    monkeypatch.setattr(CatchingUp, "_ask_again", lambda self, names: None)


def followed_with(**wrong: object) -> Callable:
    """What a source says of a step is something else to the newcomer."""
    return lambda self, before, marker, sums: before(self, replace(marker, **wrong), sums)


@around("a newcomer enters a step too early", Newcomer, "_followed")
def too_early(self, before, step):
    planned, clock = self._view.pending, self._catching_up.clock
    if planned is not None and clock == planned.from_step - 2 and self._catching_up.whole:
        return planned
    return before(self, step)


@around("a newcomer misses an update", FilledStage, "follow", also=all_hashes_are_equal)
def missed(self, before, marker, sums):
    first = min(sums, default=None)
    before(self, marker, {name: value for name, value in sums.items() if name != first or marker.step % 3})


@mistake("a damaged unit is taken as it is")
def damaged(monkeypatch) -> None:
    all_hashes_are_equal(monkeypatch)
    wrong_weights(monkeypatch)


around("what may be taken back is served", Servings, "between", seen=91, also=all_hashes_are_equal)(
    lambda self, before, stepped, committed, *more: before(self, stepped, max(stepped, committed), *more)
)
around(
    "a newcomer applies steps without regard to their norm", FilledStage, "follow", seen=9, also=all_hashes_are_equal
)(followed_with(norm=None))
around("the sum of a unit that is read after it goes nowhere", Service, "between", seen=148, also=not_asked_again)(
    lambda self, before, stepped, valid_from, summed, *more: before(self, stepped, valid_from, False, *more)
)


@instead("what a lost source has given is kept as it was", CatchingUp, "_drop", seen=653, also=not_asked_again)
def source_lost(self, source):
    self._streams.pop(source).inlet.close()
    for name in [name for name, whom in self._from.items() if whom == source and name not in self._here]:
        del self._from[name]
    self._share_out()


instead("a newcomer has work before its state is compared", Joining, "unproven", seen=69, also=wrong_weights)(
    lambda self, roster: []
)


def deserted(monkeypatch) -> None:
    """Nobody looks after a newcomer whose last source is lost before it has sent anything."""
    monkeypatch.setattr(returns, "see_sources", lambda state: None)


around("a rejected step calls off who was announced", generations, "regroup", seen=92052)(
    lambda state, before, *given, keeps_plan=False, **more: before(state, *given, **more)
)
instead("a newcomer begins its iterator anew", IteratorData, "skip_to", seen=622)(lambda self, place: None)
around("a newcomer takes what was computed with rejected weights", FilledStage, "follow", seen=9)(
    followed_with(valid_from=0)
)
instead("a newcomer that has gone stays in the generation to come", returns, "_call_off", seen=83)(
    lambda state, newcomer: None
)
instead(
    "who has entered a generation that is replaced before it came in force is let in no more",
    Joining,
    "left_out",
    seen=10040,
)(lambda self, roster: [])
instead("whoever came back is not heard where its predecessor was not", SimulatedMachine, "listen_to", seen=1056)(
    lambda self, members: None
)


@mistake("whoever came back is heard once its receiver goes on, and it may send before", seen=2964)
def heard_late(monkeypatch) -> None:
    monkeypatch.setattr(SimulatedMachine, "keep_only", SimulatedMachine.listen_to)
    monkeypatch.setattr(SimulatedMachine, "listen_to", lambda self, members: None)


instead(
    "what is used of a replica's batches that has lost both its ends is used again", Unfinished, "behind", seen=622
)(lambda self, replica, before: self.said.get(replica, before))
instead("the places that ends say with their steps are not kept", Places, "stepped", seen=622)(
    lambda self, message, replica: None
)


@mistake("the state after a step is hashed while scripts may still change it", seen=2179)
def hashed_between(monkeypatch) -> None:
    always = property(lambda self: self._steps.stepped + 1, lambda self, step: None)
    monkeypatch.setattr(Worker, "_final", always, raising=False)


instead("what a source's script has changed is not sent again", SimulatedState, "changed", seen=2179)(
    lambda self, names: []
)
instead(
    "what a newcomer's script changes before the first step that it trains is dropped", Newcomer, "enters", seen=2179
)(False)
instead(
    "whose script begins where the others are takes nothing of what these have changed",
    Newcomer,
    "_await_changes",
    seen=43,
)(lambda self: iter(()))
around("a step is followed with what the script here has set, and not there", FilledStage, "follow", seen=43)(
    followed_with(settings=None)
)
around("what comes on a board later is told to nobody", Boards, "post", seen=31)(
    lambda self, before, message, gone, out: before(self, message, gone, CoordinatorOutput())
)


@around("what was posted in a membership goes as soon as somebody has read it", Boards, "read", seen=31)
def gone_when_read(self, before, asked, out):
    before(self, asked, out)
    for rank in asked.ranks if asked.generation != ALWAYS else ():
        if rank in self._present:
            self._present[rank].values.pop(asked.board, None)


@instead("what a source says before its newcomer has come is lost", SimulatedLine, "connect", seen=1078)
def nobody_there(self, taker):
    self._taker = taker


instead("who leaves keeps its lines to newcomers", Servings, "close", seen=7449)(lambda self: None)
around("a newcomer says anew what it has where it knew before that a source was gone", Joining, "caught_up", seen=4524)(
    lambda self, before, newcomer, sources, *more: before(self, newcomer, newcomer.came, *more)
)


@around("who was to give the head is not asked again over another line", CatchingUp, "_drop", seen=74)
def asked_once(self, before, source):
    lead = self._lead
    before(self, source)
    self._lead = lead


@around(
    "a newcomer takes no note that the coordinator took its last source from it", CatchingUp, "keep_only", seen=1078
)
def not_noted(self, before, workers):
    renewed = self.renewed
    before(self, workers)
    self.renewed = renewed


@around("what was asked for before a newcomer began anew stands before the head", CatchingUp, "_take", seen=1078)
def in_the_way(self, before, source, stream, item):
    return (self.clock is not None or not isinstance(item, Unit)) and before(self, source, stream, item)
