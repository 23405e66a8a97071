"""Mistakes in what goes on around steps: plain iterators' data, evaluations, checkpoints, paces, and the planned end.

As tests/mistakes.
"""

from __future__ import annotations

from dataclasses import replace

from recycle_plugin.core.coordinator import commits, departures, ends, generations, losses
from recycle_plugin.core.coordinator.facts.barriers import Barriers
from recycle_plugin.core.coordinator.facts.places import Places
from recycle_plugin.core.vocabulary import iterator_draws
from recycle_plugin.core.vocabulary.barrier import Barrier, Meets
from recycle_plugin.core.vocabulary.evaluation_route import runner
from recycle_plugin.core.vocabulary.instruction import Op
from recycle_plugin.core.worker import checkpoint_saving
from recycle_plugin.core.worker.control_view import ControlView
from recycle_plugin.core.worker.evaluation import Evaluations
from recycle_plugin.core.worker.executor import Interrupted
from recycle_plugin.core.worker.iterator_data import IteratorData
from recycle_plugin.core.worker.step_store import StepStore
from recycle_plugin.core.worker.training_loop import TrainingLoop
from recycle_plugin.lab.simulator import script
from recycle_plugin.lab.simulator.simulated_worker import SimulatedMachine
from tests.mistakes import around, instead, mistake

# --- iterators' data ------------------------------------------------------------------------------------


@mistake("nobody but who runs it gets a copy of a batch", seen=52)
def no_keeper(monkeypatch) -> None:
    share = iterator_draws.share

    def without(iterator_state, step, *more):
        found, runs = share(iterator_state, step, *more), iterator_draws._runs(iterator_state, step)
        kept = tuple(one for one in found.transfers if runs.get((one.taker.stage, one.micro_batch)) == one.taker)
        return replace(found, transfers=kept)

    monkeypatch.setattr("recycle_plugin.core.worker.iterator_data.share", without)


@around("a batch goes once it is loaded", StepStore, "_conclude", seen=3)
def gone_once_loaded(self, before, instruction, needed, made, boundary_only):
    before(self, instruction, needed, made, boundary_only)
    if instruction.op is Op.LOAD:
        for datum in self.requires(instruction):
            self._remove(datum)


@mistake("what is drawn for others is what is drawn for oneself", seen=23)
def drawn_twice(monkeypatch) -> None:
    deal = iterator_draws._deal

    def changed(state, step, known, *more):
        own = state.plan.view.topology.micro_batches
        return {
            one: iterator_draws.Draw(draw.source, draw.position % own) if one not in known else draw
            for one, draw in deal(state, step, known, *more).items()
        }

    monkeypatch.setattr(iterator_draws, "_deal", changed)


instead("what was drawn before a failure counts no more", iterator_draws, "_known", seen=23)(lambda here, step: {})
instead("what the lost have sent may come at any time", SimulatedMachine, "hear_out", seen=1560)(lambda self: None)
instead("a worker says nothing of what it has drawn", IteratorData, "held_draws", seen=23)(lambda self: {})
instead("what was drawn for a step that is dropped is kept", StepStore, "drop_draws", seen=203)(lambda self, step: None)


@mistake("the data ends with the first iterator that does", seen=443)
def ends_with_the_first(monkeypatch) -> None:
    def first(reports, committed):
        step = max((report.lacks for report in reports.by_worker.values()), default=0)
        return step if step > committed else 0

    monkeypatch.setattr(Places, "unfilled", staticmethod(first))


@around("the last stage reads one batch more when a replica is lost", IteratorData, "take_state", seen=23)
def one_more(self, before, iterator_state):
    before(self, iterator_state)
    if (
        len(iterator_state.plan.view.live) < len(iterator_state.plan.view.topology.seats)
        and self._store.seat.stage > 0
        and not hasattr(self, "_more")
    ):
        self._more = self._iterator.read(0, 0, None)


# --- evaluations and checkpoints --------------------------------------------------------------------------


@around("who reads what a lost worker would have evaluated keeps it", Evaluations, "_hand_out", seen=7)
def not_handed_out(self, before, plan, datum, batch):
    if runner(plan, datum.stage, datum.micro_batch) == self._seat:
        before(self, plan, datum, batch)


instead("a meeting that a failure has broken up is waited for", ControlView, "barrier_passed", seen=1)(
    lambda self, place, number: self._barriers_passed.pop(place, None)
)
around("who is lost since was at the meeting", Barriers, "arrive", seen=17)(
    lambda self, before, worker, generation, *given: before(self, worker, 0, *given)
)


@instead("a checkpoint has its name before all have written", script, "save", seen=1)
def named_early(loop, control_view, place, files, recover):
    yield from files.write(control_view.number)
    if control_view.is_first:
        yield from files.publish(control_view.number)
    while True:
        try:
            yield from loop.barrier(Barrier(Meets.SCRIPT, place), {})
            return ""
        except Interrupted:
            yield from recover()


@instead("nobody waits until a checkpoint has its name", script, "save", seen=1)
def not_waited_for(loop, control_view, place, files, recover):
    while True:
        try:
            yield from files.write(control_view.number)
            yield from loop.barrier(Barrier(Meets.SCRIPT, place), {})
            return (yield from files.publish(control_view.number)) if control_view.is_first else ""
        except Interrupted:
            yield from recover()


instead("a checkpoint has its name although somebody could not write", checkpoint_saving, "why_not", seen=5)(
    lambda met: ""
)


@instead("only who can't write knows that there is no checkpoint", script, "save", seen=5)
def own_verdict(loop, control_view, place, files, recover):
    while True:
        yield from loop.settle()
        try:
            error = yield from files.write(control_view.number)
            written = yield from loop.barrier(
                Barrier(Meets.SCRIPT, place), checkpoint_saving._said(control_view, error)
            )
            if control_view.is_first and not written.values:
                error = yield from files.publish(control_view.number)
            yield from loop.barrier(Barrier(Meets.SAVED, place), {})
            return error
        except Interrupted:
            yield from recover()


@instead("what another still writes is removed", script, "save", seen=5)
def removed_early(loop, control_view, place, files, recover):
    while True:
        yield from loop.settle()
        try:
            error = yield from files.write(control_view.number)
            if error:
                yield from files.discard(control_view.number)
            written = yield from loop.barrier(
                Barrier(Meets.SCRIPT, place), checkpoint_saving._said(control_view, error)
            )
            why = checkpoint_saving.why_not(written)
            if control_view.is_first and not why:
                error = yield from files.publish(control_view.number)
            return why or checkpoint_saving.why_not(
                (yield from loop.barrier(Barrier(Meets.SAVED, place), checkpoint_saving._said(control_view, error)))
            )
        except Interrupted:
            yield from recover()


instead("what is saved and evaluated need not be committed", TrainingLoop, "settle", seen=23)(lambda self: iter(()))


# --- paces and ends ---------------------------------------------------------------------------------------


@mistake("work is dealt out anew for a step that somebody has begun", seen=106)
def too_early(monkeypatch) -> None:
    for where in (commits, generations):
        monkeypatch.setattr(where, "unstarted", lambda committed: committed + 1)


instead("a worker that asks for everybody's end is not heard", departures, "_end_planned", seen=105)(
    lambda state, why: state.say("terminate", why)
)


@around("nobody needs anybody any more at a planned end", losses, "_go_on_after", seen=204)
def no_need(state, before, member):
    if state.ending.through(state.committed):
        departures.await_without(state, member, False)
        ends.finish_if_empty(state)
    else:
        before(state, member)


instead(
    "who has left as planned, and does not know it yet, is to go on with the others", ControlView, "has_left", seen=291
)(lambda self, generation: False)


def reports_for_a_change_that_nobody_needs(monkeypatch) -> None:
    """Who knows that all is committed does, at a planned end."""

    def await_commit(self, step):
        yield from self._port.wait("the commit", lambda: self._control_view.is_committed(step))

    monkeypatch.setattr(TrainingLoop, "_await_commit", await_commit)


def waits_for_a_change_that_nobody_needs(monkeypatch) -> None:
    """The coordinator does, at a planned end."""

    def give_up_going_on(state, why, cause=""):
        if not state.ending.through(state.committed):
            ends.end_without_stage(state, why, cause)
        state.ending.stranded = why

    monkeypatch.setattr(ends, "give_up_going_on", give_up_going_on)


instead(
    "a change that is planned makes a worker forget where the one before goes on", ControlView, "_is_certain", seen=66
)(lambda self, pending: self.interruption() is not None)
