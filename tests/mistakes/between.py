"""Mistakes in what goes on around steps: plain iterators' data, evaluations, checkpoints, paces, and the planned end.

As tests/mistakes.
"""

from __future__ import annotations

from dataclasses import replace

from recycle_plugin.core.coordinator import course, departures, ends
from recycle_plugin.core.coordinator.barriers import Barriers
from recycle_plugin.core.coordinator.course import Course
from recycle_plugin.core.coordinator.places import Places
from recycle_plugin.core.vocabulary import iterator_draws
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
from tests.mistakes import mistake

# --- iterators' data ------------------------------------------------------------------------------------


@mistake("nobody but who runs it gets a copy of a batch", seen=52)
def no_keeper(monkeypatch) -> None:
    share = iterator_draws.share

    def without(iterator_state, step, *more):
        found, runs = share(iterator_state, step, *more), iterator_draws._runs(iterator_state, step)
        kept = tuple(one for one in found.transfers if runs.get((one.taker.stage, one.micro_batch)) == one.taker)
        return replace(found, transfers=kept)

    monkeypatch.setattr("recycle_plugin.core.worker.iterator_data.share", without)


@mistake("a batch goes once it is loaded", seen=3)
def gone_once_loaded(monkeypatch) -> None:
    conclude = StepStore.conclude

    def changed(self, instruction, made, boundary_only=False):
        conclude(self, instruction, made, boundary_only)
        if instruction.op is Op.LOAD:
            for datum in self.requires(instruction):
                self._remove(datum)

    monkeypatch.setattr(StepStore, "conclude", changed)


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


@mistake("what was drawn before a failure counts no more", seen=23)
def drawn_anew(monkeypatch) -> None:
    monkeypatch.setattr(iterator_draws, "_known", lambda here, step: {})


@mistake("what the lost have sent may come at any time", seen=1560)
def heard_late(monkeypatch) -> None:
    monkeypatch.setattr(SimulatedMachine, "hear_out", lambda self: None)


@mistake("a worker says nothing of what it has drawn", seen=23)
def drawn_in_secret(monkeypatch) -> None:
    monkeypatch.setattr(IteratorData, "held_draws", lambda self: {})


@mistake("what was drawn for a step that is dropped is kept", seen=203)
def draws_kept(monkeypatch) -> None:
    monkeypatch.setattr(StepStore, "drop_draws", lambda self, step: None)


@mistake("the data ends with the first iterator that does", seen=443)
def ends_with_the_first(monkeypatch) -> None:
    def first(reports, committed):
        step = max((report.lacks for report in reports.by_worker.values()), default=0)
        return step if step > committed else 0

    monkeypatch.setattr(Places, "unfilled", staticmethod(first))


@mistake("the last stage reads one batch more when a replica is lost", seen=23)
def one_more(monkeypatch) -> None:
    stand = IteratorData.take_state

    def changed(self, iterator_state):
        stand(self, iterator_state)
        if (
            len(iterator_state.plan.view.live) < len(iterator_state.plan.view.topology.seats)
            and self._store.seat.stage > 0
            and not hasattr(self, "_more")
        ):
            self._more = self._iterator.read(0, 0, None)

    monkeypatch.setattr(IteratorData, "take_state", changed)


# --- evaluations and checkpoints --------------------------------------------------------------------------


@mistake("who reads what a lost worker would have evaluated keeps it", seen=7)
def not_handed_out(monkeypatch) -> None:
    hand_out = Evaluations._hand_out

    def changed(self, plan, datum, batch):
        if runner(plan, datum.stage, datum.micro_batch) == self._seat:
            hand_out(self, plan, datum, batch)

    monkeypatch.setattr(Evaluations, "_hand_out", changed)


@mistake("a meeting that a failure has broken up is waited for", seen=1)
def met_never(monkeypatch) -> None:
    monkeypatch.setattr(
        ControlView, "barrier_passed", lambda self, place, number: self._barriers_passed.pop(place, None)
    )


@mistake("who is lost since was at the meeting", seen=17)
def met_without(monkeypatch) -> None:
    arrive = Barriers.arrive
    monkeypatch.setattr(Barriers, "arrive", lambda self, worker, generation, *given: arrive(self, worker, 0, *given))


@mistake("a checkpoint has its name before all have written", seen=1)
def named_early(monkeypatch) -> None:
    def save(loop, control_view, place, files, recover):
        yield from files.write(control_view.number)
        if control_view.is_first:
            yield from files.publish(control_view.number)
        while True:
            try:
                yield from loop.barrier(place, {})
                return ""
            except Interrupted:
                yield from recover()

    monkeypatch.setattr(script, "save", save)


@mistake("nobody waits until a checkpoint has its name", seen=1)
def not_waited_for(monkeypatch) -> None:
    def save(loop, control_view, place, files, recover):
        while True:
            try:
                yield from files.write(control_view.number)
                yield from loop.barrier(place, {})
                return (yield from files.publish(control_view.number)) if control_view.is_first else ""
            except Interrupted:
                yield from recover()

    monkeypatch.setattr(script, "save", save)


@mistake("a checkpoint has its name although somebody could not write", seen=5)
def named_in_part(monkeypatch) -> None:
    monkeypatch.setattr(checkpoint_saving, "why_not", lambda met: "")


@mistake("only who can't write knows that there is no checkpoint", seen=5)
def own_verdict(monkeypatch) -> None:
    def save(loop, control_view, place, files, recover):
        while True:
            yield from loop.settle()
            try:
                error = yield from files.write(control_view.number)
                written = yield from loop.barrier(place, {str(control_view.rank): error} if error else {})
                if control_view.is_first and not written.values:
                    error = yield from files.publish(control_view.number)
                yield from loop.barrier(f"the end of {place}", {})
                return error
            except Interrupted:
                yield from recover()

    monkeypatch.setattr(script, "save", save)


@mistake("what another still writes is removed", seen=5)
def removed_early(monkeypatch) -> None:
    def save(loop, control_view, place, files, recover):
        while True:
            yield from loop.settle()
            try:
                error = yield from files.write(control_view.number)
                if error:
                    yield from files.discard(control_view.number)
                written = yield from loop.barrier(place, {str(control_view.rank): error} if error else {})
                why = checkpoint_saving.why_not(written)
                if control_view.is_first and not why:
                    error = yield from files.publish(control_view.number)
                return why or checkpoint_saving.why_not(
                    (yield from loop.barrier(f"the end of {place}", {str(control_view.rank): error} if error else {}))
                )
            except Interrupted:
                yield from recover()

    monkeypatch.setattr(script, "save", save)


@mistake("what is saved and evaluated need not be committed", seen=23)
def uncommitted(monkeypatch) -> None:
    monkeypatch.setattr(TrainingLoop, "settle", lambda self: iter(()))


# --- paces and ends ---------------------------------------------------------------------------------------


@mistake("work is dealt out anew for a step that somebody has begun", seen=106)
def dealt_too_early(monkeypatch) -> None:
    monkeypatch.setattr(course, "unstarted", lambda committed: committed + 1)


@mistake("nobody needs anybody any more at a planned end", seen=204)
def no_need(monkeypatch) -> None:
    after_loss = Course._after_loss

    def changed(self, member, now, out):
        if self.ending.through(self.committed):
            departures.await_without(self, member, False, now, out)
            ends.finish_if_empty(self, out)
        else:
            after_loss(self, member, now, out)

    monkeypatch.setattr(Course, "_after_loss", changed)


@mistake("who has left as planned, and does not know it yet, is to go on with the others", seen=291)
def not_departed(monkeypatch) -> None:
    monkeypatch.setattr(ControlView, "has_left", lambda self, generation: False)


def reports_for_a_change_that_nobody_needs(monkeypatch) -> None:
    """Who knows that all is committed does, at a planned end."""

    def await_commit(self, step):
        yield from self._port.wait("the commit", lambda: self._control_view.is_committed(step))

    monkeypatch.setattr(TrainingLoop, "_await_commit", await_commit)


def waits_for_a_change_that_nobody_needs(monkeypatch) -> None:
    """The coordinator does, at a planned end."""

    def give_up_going_on(course, why, out, cause=""):
        if not course.ending.through(course.committed):
            ends.end_without_stage(course, why, out, cause)
        course.ending.stranded = why

    monkeypatch.setattr(ends, "give_up_going_on", give_up_going_on)


@mistake("a change that is planned makes a worker forget where the one before goes on", seen=66)
def forgotten(monkeypatch) -> None:
    monkeypatch.setattr(ControlView, "_is_certain", lambda self, pending: self.interruption() is not None)
