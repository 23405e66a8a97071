"""Mistakes about workers that come back.

As tests/mistakes.  What gives a newcomer a wrong state is planted together with a coordinator that takes every
hash for equal: else the comparison finds it, and nothing wrong gets in.
"""

from __future__ import annotations

from dataclasses import replace

from recycle_plugin.core.coordinator import returns
from recycle_plugin.core.coordinator.boards import Boards
from recycle_plugin.core.coordinator.course import Course
from recycle_plugin.core.coordinator.joining import Joining
from recycle_plugin.core.coordinator.output import CoordinatorOutput
from recycle_plugin.core.coordinator.places import Places, Unfinished
from recycle_plugin.core.messages.from_workers import ALWAYS
from recycle_plugin.core.worker.catching_up import CatchingUp
from recycle_plugin.core.worker.filled_stage import FilledStage
from recycle_plugin.core.worker.iterator_data import IteratorData
from recycle_plugin.core.worker.newcomer import Newcomer
from recycle_plugin.core.worker.serving import Serving, Servings
from recycle_plugin.core.worker.whereabouts import Whereabouts
from recycle_plugin.core.worker.worker import Worker
from recycle_plugin.lab.simulator.simulated_state import Pipe, SimulatedState
from recycle_plugin.lab.simulator.simulated_worker import SimulatedMachine
from tests.mistakes import mistake


def all_hashes_are_equal(monkeypatch) -> None:
    add_hash = Joining.add_hash
    monkeypatch.setattr(
        Joining, "add_hash", lambda self, message, stage: add_hash(self, replace(message, digest="equal"), stage)
    )


def wrong_weights(monkeypatch) -> None:
    send = Pipe.send

    def changed(self, item):
        send(self, replace(item, value=item.value + 1) if getattr(item, "name", "") == "weight" else item)

    monkeypatch.setattr(Pipe, "send", changed)


@mistake("a newcomer enters a step too early")
def too_early(monkeypatch) -> None:
    followed = Newcomer._followed

    def sooner(self, step):
        planned, clock = self._view.pending, self._catching_up.clock
        if planned is not None and clock == planned.from_step - 2 and self._catching_up.whole:
            return planned
        return followed(self, step)

    monkeypatch.setattr(Newcomer, "_followed", sooner)


@mistake("a newcomer misses an update")
def missed(monkeypatch) -> None:
    all_hashes_are_equal(monkeypatch)
    follow = FilledStage.follow

    def without_one(self, marker, sums):
        first = min(sums, default=None)
        follow(self, marker, {name: value for name, value in sums.items() if name != first or marker.step % 3})

    monkeypatch.setattr(FilledStage, "follow", without_one)


@mistake("a damaged unit is taken as it is")
def damaged(monkeypatch) -> None:
    all_hashes_are_equal(monkeypatch)
    wrong_weights(monkeypatch)


@mistake("what may be taken back is served", seen=91)
def uncommitted(monkeypatch) -> None:
    all_hashes_are_equal(monkeypatch)
    between = Servings.between
    monkeypatch.setattr(
        Servings,
        "between",
        lambda self, stepped, committed, *more: between(self, stepped, max(stepped, committed), *more),
    )


@mistake("a newcomer applies steps without regard to their norm", seen=9)
def without_norm(monkeypatch) -> None:
    all_hashes_are_equal(monkeypatch)
    follow = FilledStage.follow
    monkeypatch.setattr(
        FilledStage, "follow", lambda self, marker, sums: follow(self, replace(marker, norm=None), sums)
    )


@mistake("the sum of a unit that is read after it goes nowhere", seen=31)
def sum_lost(monkeypatch) -> None:
    all_hashes_are_equal(monkeypatch)
    between = Serving.between
    monkeypatch.setattr(
        Serving,
        "between",
        lambda self, stepped, valid_from, summed, *more: between(self, stepped, valid_from, False, *more),
    )
    monkeypatch.setattr(CatchingUp, "_ask_again", lambda self, names: None)


@mistake("what a lost source has given is kept as it was", seen=653)
def source_lost(monkeypatch) -> None:
    all_hashes_are_equal(monkeypatch)

    def drop(self, source):
        self._streams.pop(source).inlet.close()
        for name in [name for name, whom in self._from.items() if whom == source and name not in self._here]:
            del self._from[name]
        self._share_out()

    monkeypatch.setattr(CatchingUp, "_drop", drop)
    monkeypatch.setattr(CatchingUp, "_ask_again", lambda self, names: None)


@mistake("a newcomer has work before its state is compared", seen=69)
def work_at_once(monkeypatch) -> None:
    wrong_weights(monkeypatch)
    monkeypatch.setattr(Joining, "unproven", lambda self, roster: [])


def deserted(monkeypatch) -> None:
    """Nobody looks after a newcomer whose last source is lost before it has sent anything."""
    monkeypatch.setattr(returns, "see_sources", lambda course, now, out: None)


@mistake("a rejected step calls off who was announced", seen=92052)
def called_off_by_rejections(monkeypatch) -> None:
    regroup = Course.regroup
    monkeypatch.setattr(Course, "regroup", lambda self, *given, keeps_plan=False, **more: regroup(self, *given, **more))


@mistake("a newcomer begins its iterator anew", seen=622)
def cursor(monkeypatch) -> None:
    monkeypatch.setattr(IteratorData, "skip_to", lambda self, place: None)


@mistake("a newcomer takes what was computed with rejected weights", seen=9)
def valid_from(monkeypatch) -> None:
    follow = FilledStage.follow
    monkeypatch.setattr(
        FilledStage, "follow", lambda self, marker, sums: follow(self, replace(marker, valid_from=0), sums)
    )


@mistake("a newcomer that has gone stays in the generation to come", seen=83)
def not_called_off(monkeypatch) -> None:
    monkeypatch.setattr(returns, "_call_off", lambda course, newcomer, now, out: None)


@mistake("who has entered a generation that is replaced before it came in force is let in no more", seen=1296)
def left_out(monkeypatch) -> None:
    monkeypatch.setattr(Joining, "left_out", lambda self, roster: [])


@mistake("a newcomer does not say where it is for a membership that it has reported for, and passed over", seen=1065)
def says_nothing_for_passed_over(monkeypatch) -> None:
    adopt = Whereabouts.adopt
    monkeypatch.setattr(
        Whereabouts, "adopt", lambda self, generation, words, lets_in, first: adopt(self, generation, words, lets_in)
    )


@mistake("whoever came back is not heard where its predecessor was not", seen=1056)
def unheard(monkeypatch) -> None:
    monkeypatch.setattr(SimulatedMachine, "listen_to", lambda self, members: None)


@mistake("whoever came back is heard once its receiver goes on, and it may send before", seen=2964)
def heard_late(monkeypatch) -> None:
    monkeypatch.setattr(SimulatedMachine, "keep_only", SimulatedMachine.listen_to)
    monkeypatch.setattr(SimulatedMachine, "listen_to", lambda self, members: None)


@mistake("what is used of a replica's batches that has lost both its ends is used again", seen=622)
def drawn_of_lost(monkeypatch) -> None:
    monkeypatch.setattr(Unfinished, "behind", lambda self, replica, before: self.said.get(replica, before))


@mistake("the places that ends say with their steps are not kept", seen=622)
def place_not_kept(monkeypatch) -> None:
    monkeypatch.setattr(Places, "stepped", lambda self, message, replica: None)


@mistake("the state after a step is hashed while scripts may still change it", seen=2179)
def hashed_between(monkeypatch) -> None:
    always = property(lambda self: self._steps.stepped + 1, lambda self, step: None)
    monkeypatch.setattr(Worker, "_final", always, raising=False)


@mistake("what a source's script has changed is not sent again", seen=2179)
def changed_unseen(monkeypatch) -> None:
    monkeypatch.setattr(SimulatedState, "changed", lambda self, names: [])


@mistake("what a newcomer's script changes before the first step that it trains is dropped", seen=2179)
def dropped_as_it_enters(monkeypatch) -> None:
    monkeypatch.setattr(Newcomer, "enters", False)


@mistake("whose script begins where the others are takes nothing of what these have changed", seen=43)
def not_brought_in(monkeypatch) -> None:
    monkeypatch.setattr(Newcomer, "_await_changes", lambda self: iter(()))


@mistake("a step is followed with what the script here has set, and not there", seen=43)
def settings(monkeypatch) -> None:
    follow = FilledStage.follow
    monkeypatch.setattr(
        FilledStage, "follow", lambda self, marker, sums: follow(self, replace(marker, settings=None), sums)
    )


@mistake("what comes on a board later is told to nobody", seen=31)
def told_to_nobody(monkeypatch) -> None:
    post = Boards.post
    monkeypatch.setattr(Boards, "post", lambda self, message, gone, out: post(self, message, gone, CoordinatorOutput()))


@mistake("what was posted in a membership goes as soon as somebody has read it", seen=31)
def gone_when_read(monkeypatch) -> None:
    read = Boards.read

    def once(self, asked, out):
        read(self, asked, out)
        for rank in asked.ranks if asked.generation != ALWAYS else ():
            if rank in self._present:
                self._present[rank].values.pop(asked.board, None)

    monkeypatch.setattr(Boards, "read", once)
