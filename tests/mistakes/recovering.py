"""Mistakes in the recovery of any job.

Those of the loop, lineage, step machine and membership change production code; those of what the campaign simulates
(sums, tensors, lines) change that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from recycle_plugin.core.coordinator import commits, departures, generations, losses, lost_messages
from recycle_plugin.core.coordinator.facts.attendance import Attendance
from recycle_plugin.core.coordinator.facts.complaints import Complaints
from recycle_plugin.core.coordinator.facts.ending import Ending
from recycle_plugin.core.coordinator.facts.regrouping import Regrouping
from recycle_plugin.core.coordinator.facts.step_ledger import StepLedger
from recycle_plugin.core.coordinator.facts.vacancies import Vacancies
from recycle_plugin.core.coordinator.state_dump import load
from recycle_plugin.core.messages.contributions import NORM
from recycle_plugin.core.messages.said import OfWorker
from recycle_plugin.core.vocabulary import recovery_plan
from recycle_plugin.core.vocabulary.causes import Cause
from recycle_plugin.core.vocabulary.commit_rule import StepMachine
from recycle_plugin.core.vocabulary.dataflow import Datum, goes_to
from recycle_plugin.core.vocabulary.instruction import Op
from recycle_plugin.core.vocabulary.roster import Roster, WorkerId
from recycle_plugin.core.worker import control_view, training_loop
from recycle_plugin.core.worker import worker as core_worker
from recycle_plugin.core.worker.control_view import ControlView
from recycle_plugin.core.worker.step_store import StepStore
from recycle_plugin.core.worker.worker import Worker
from recycle_plugin.lab.simulator import arithmetic, cluster, coordination
from recycle_plugin.lab.simulator import simulated_worker as worker
from recycle_plugin.lab.simulator.numbers import Numbers
from recycle_plugin.planner.closure import Holdings
from recycle_plugin.planner.recovery import Recovery
from tests.mistakes import around, changed, changed_holdings, changed_recovery_plans, instead, mistake

# --- lineage and loop ---------------------------------------------------------------------------------


mistake("no step is taken back", seen=6)(
    lambda monkeypatch: changed_recovery_plans(monkeypatch, lambda recovery: replace(recovery, undo=frozenset()))
)
mistake("a stage does not roll forward", seen=74)(
    lambda monkeypatch: changed_recovery_plans(monkeypatch, lambda recovery: replace(recovery, holders={}))
)


@mistake("a weight gradient is left out", seen=2)
def left_out(monkeypatch) -> None:
    def change(recovery):
        weight = recovery.rest.weight.copy()
        weight.flat[np.flatnonzero(weight)[:1]] = False
        return replace(recovery, rest=replace(recovery.rest, weight=weight))

    changed_recovery_plans(monkeypatch, change)


@mistake("a step that was taken back is not done again", seen=6)
def not_again(monkeypatch) -> None:
    def change(recovery):
        closing = {
            seat: tuple(one for one in ops if seat not in recovery.undo or one.op is not Op.STEP)
            for seat, ops in recovery.closing.items()
        }
        return replace(recovery, closing=closing)

    changed_recovery_plans(monkeypatch, change)


mistake("finished work is counted again", seen=2)(
    lambda monkeypatch: changed_holdings(monkeypatch, lambda datum: datum.kind != "wgrad")
)
mistake("a sum that some hold is forgotten", seen=2)(
    lambda monkeypatch: changed_holdings(monkeypatch, lambda datum: datum.kind != "reduced")
)


@mistake("the plan of the first membership is kept", seen=2)
def old_plan(monkeypatch) -> None:
    plan_for = training_loop.TrainingLoop._plan_for

    def first(self, generation):
        self._first = getattr(self, "_first", None) or plan_for(self, generation)
        return self._first

    monkeypatch.setattr(training_loop.TrainingLoop, "_plan_for", first)


def kept_stashes(self, before, step) -> None:
    stashes = {datum: self[datum] for datum in self if datum.kind == "stash"}
    before(self, step)
    for datum, value in stashes.items():
        self.put(datum, value)


@mistake("a later step's stash outlives a step that is taken back", seen=42)
def stash_stays(monkeypatch) -> None:
    def stays(held, recovery):
        later = {seat: Datum("params", seat.stage, None, recovery.step + 1) for seat in recovery.undo}
        return {seat: frozenset(datum for datum in have if datum != later.get(seat)) for seat, have in held.items()}

    for module in (recovery_plan, training_loop):
        monkeypatch.setattr(module, "surviving", stays)
    changed(monkeypatch, StepStore, "undo", kept_stashes)


around(
    "a later step's stash outlives a step that is taken back until its forward is run again, and another failure comes "
    "before that",
    StepStore,
    "undo",
    seen=904,
)(kept_stashes)
instead("a STEP does not wait for the commit before it", StepMachine, "may_apply", seen=62)(lambda self, step: True)
instead("a wait is not interrupted", ControlView, "check", seen=5)(ControlView.check_end)


# --- membership ---------------------------------------------------------------------------------------


@instead("a step is committed when one worker has applied it", commits, "stepped", seen=0)
def committed_by_one(state, stepped) -> None:
    for number in range(state.committed + 1, stepped.step + 1):
        commits.commit(state, number)


around("a report for an older membership counts", Regrouping, "add", seen=5)(
    lambda self, before, report: before(self, replace(report, generation=self.generation))
)
instead("what a lost worker says counts", Attendance, "is_heard", seen=488)(
    lambda self, message: self.started or not message.RUNNING
)
instead("whoever goes while the membership changes is waited for", departures, "await_without", seen=819)(
    lambda state, member, early: None
)


@around("what is said of a committed step counts", StepLedger, "contribute", seen=2)
def committed_heard(self, before, message, out):
    committed, self.committed = self.committed, 0
    try:
        return before(self, message, out)
    finally:
        self.committed = committed


@around("the job goes on before all have reported", Regrouping, "complete", seen=2)
def first_report(self, before, live):
    if self._awaiting is not None and self._reports:
        said = next(iter(self._reports.values()))
        self._reports = {member.worker: replace(said, held={}) for member in self._awaiting.roster} | self._reports
    return before(self, live)


instead("what a broken line has lost is not sent again", lost_messages, "missing", seen=2)(lambda state, missing: None)
instead("a stopped worker is waited for", losses, "give_up", seen=10)(lambda state, worker, cause, why: None)


@around("who does not hear itself is no more to be doubted than others", Complaints, "add", seen=2)
def deaf_unheard(self, before, missing, roster, *given):
    return None if str(roster.member(missing.worker).seat) == missing.source else before(self, missing, roster, *given)


instead("who hears nobody says so only once it has waited for long enough", Worker, "_meets_again", seen=3438)(
    lambda self: False
)


# --- who takes part, and what is known of them ------------------------------------------------------------


@mistake("a second process of a rank is heard", seen=1)
def late_heard(monkeypatch) -> None:
    monkeypatch.setattr(Attendance, "turn_away", lambda self, worker, host, step, out: None)
    monkeypatch.setattr(Vacancies, "is_outside", lambda self, worker: False)


instead("all processes of a rank are one worker", OfWorker, "worker", seen=6)(
    property(lambda self: WorkerId(self.rank))
)


@mistake("who holds a seat is asked of the first membership", seen=5)
def first_roster(monkeypatch) -> None:
    def roster(self):
        self._first = getattr(self, "_first", None) or (self.generation.roster if self.generation else None)
        return self._first or Roster()

    monkeypatch.setattr(ControlView, "roster", property(roster))


instead("who is gone stays on the roster", Roster, "without", seen=5)(lambda self, workers: self)


@instead("the coordinator forgets who has applied what when its state is read again", coordination, "load", seen=169)
def forgotten_field(record):
    membership = load(record)
    membership.state.steps._applied = {}
    return membership


@instead("the coordinator forgets what it has told when its state is read again", coordination, "load", seen=71)
def forgotten_word(record):
    membership = load(record)
    membership.state.steps._contributions._told = {}
    return membership


# --- the norm that a step waits for -------------------------------------------------------------------


@mistake("a norm is made again after a failure, as if nobody had stepped with the first", seen=77)
def second_norm(monkeypatch) -> None:
    regroup = generations.regroup

    def regrouped(state, cause, from_step=0, keeps_plan=False) -> None:
        contributions = state.steps._contributions
        contributions._told = {key: values for key, values in contributions._told.items() if key[1] != NORM}
        contributions._values = {key: values for key, values in contributions._values.items() if key[1] != NORM}
        regroup(state, cause, from_step, keeps_plan)

    monkeypatch.setattr(generations, "regroup", regrouped)
    handed_out_once(monkeypatch)


@mistake("a norm that was told is forgotten once it was used", seen=114)
def handed_out_once(monkeypatch) -> None:
    monkeypatch.setattr(ControlView, "collected", lambda self, step, name: self._collected.pop((step, name), None))


# --- sums, tensors, lines -----------------------------------------------------------------------------


@around("a partial sum is used", worker.SimulatedMachine, "add_up", seen=2)
def partial_sum(self, before, instruction, have, holder):
    try:
        return (yield from before(self, instruction, have, holder))
    except worker.Died:
        raise
    except BaseException:
        if instruction.op is Op.REDUCE and holder is None:
            have.put(
                Datum("reduced", self.seat.stage, None, instruction.step),
                self.numbers.total([self.numbers.sums(instruction.step)]),
            )
        raise


@around("sums are divided by the live workers", worker.SimulatedMachine, "add_up", seen=2)
def wrong_divisor(self, before, instruction, have, holder):
    total = yield from before(self, instruction, have, holder)
    live = len(self.control_view.roster.stage(self.seat.stage))
    divided = total * self.cluster.scenario.shape.replicas * pow(live, -1, arithmetic.PRIME) % arithmetic.PRIME
    return divided if instruction.op is Op.REDUCE else total


@around("random numbers belong to the worker", worker.SimulatedMachine, "compute", seen=5)
def masks_by_worker(self, before, instruction, have, boundary_only):
    made = before(self, instruction, have, boundary_only)
    if instruction.op is Op.F:
        made[Datum("act", instruction.stage, instruction.micro_batch, instruction.step)] += (
            self.seat.replica - instruction.micro_batch.replica
        )
    return made


mistake("kept tensors go although peers plan with them", seen=2)(
    lambda monkeypatch: forgetful(
        monkeypatch,
        lambda self: [datum for datum in self if datum.kind in ("act", "grad") and datum.stage == self.seat.stage],
    )
)


@around("what takes a step back goes with the step", StepStore, "_conclude", seen=6)
def no_record(self, before, instruction, needed, made, boundary_only):
    before(self, instruction, needed, made, boundary_only)
    if instruction.op is Op.STEP:
        self._before = self._before[0], self[Datum("params", self.seat.stage, None, instruction.step + 1)]


mistake("sums are dropped when the step is taken up again", seen=2)(
    lambda monkeypatch: forgetful(monkeypatch, lambda self: [datum for datum in self if datum.kind == "wgrad"][:1])
)


def forgetful(monkeypatch, goes: Callable[[StepStore], list[Datum]]) -> None:
    def held(self, before):
        found = before(self)
        for datum in goes(self):
            self._remove(datum)
        return found

    changed(monkeypatch, StepStore, "held", held)


@around("tensors do not say of which step they are", cluster.Cluster, "_arrive", seen=0)
def no_step(self, before, source, target, datum, value, valid_from) -> None:
    before(self, source, target, datum, value, valid_from)
    before(self, source, target, datum._replace(step=datum.step + 1), value, valid_from)


# --- exact mode -----------------------------------------------------------------------------------------


@around("blocks are added in the order in which they come", Numbers, "total", seen=0)
def order_of_arrival(self, before, brought):
    totals = [total for part in brought for total in part.values()]
    return functools.reduce(lambda found, total: arithmetic.added(found, total, self._scenario.ordered), totals, 0)


@around("a block that a worker has begun goes on with another", Holdings, "__init__", seen=243)
def homeless(self, before, plan, step, held) -> None:
    before(self, plan, step, held)
    inner, stash = self.made("inner"), self.made("stash")
    route = np.frombuffer(plan.route.data, np.int32).reshape(inner.shape)
    self.home = np.where(inner >= 0, inner, np.where(stash >= 0, stash, route))


@around("what is left of a block is added in another order", Recovery, "computed", seen=15)
def turned_round(self, before, seat):
    program = before(self, seat)
    weights = [one for one in program if one.op is Op.W]
    if {one.micro_batch for one in weights} & {one.micro_batch for one in program if one.op is Op.I}:
        return program
    last = iter(sorted(weights, key=lambda one: one.micro_batch, reverse=True))
    return tuple(next(last) if one.op is Op.W else one for one in program)


# --- rejected steps -----------------------------------------------------------------------------------


instead("what was computed with rejected weights stays", Worker, "discard_after", seen=6)(
    lambda self, after, valid_from: None
)
around("a late tensor computed with rejected weights counts", StepStore, "arrive", seen=16)(
    lambda self, before, datum, value, valid_from: before(self, datum, value, self.valid_from)
)
instead("who has stepped does not hear of a rejection", Worker, "record_norm", seen=6)(lambda self, step, norm: None)
instead("a rejected step is committed by a failure that comes at once", StepLedger, "_unheard", seen=6)(
    lambda self, step, held, behind: False
)
instead("a norm counts for the worker that has found it only", commits, "_reject", seen=6)(
    lambda state, step, norm: None
)


# --- weights that stages share ------------------------------------------------------------------------


around("one stage's part of a tied gradient is left out", Numbers, "over_tie", seen=10)(
    lambda self, before, by_stage: before(self, dict(sorted(by_stage.items())[:-1]))
)


@instead("a tied gradient is made again by those alone who lack it", training_loop, "unfinished", seen=106)
def by_those_who_lack_it(recover, committed, held, *more):
    def change(recovery):
        has = {seat for seat, have in held.items() if Datum("tied", seat.stage, None, recovery.step) in have}
        closing = {
            seat: tuple(one for one in ops if one.op is not Op.TIE or seat not in has)
            for seat, ops in recovery.closing.items()
        }
        return replace(recovery, closing=closing)

    return tuple(map(change, recovery_plan.unfinished(recover, committed, held, *more)))


instead("a tied weight is in the norm once for each stage", Numbers, "share", seen=15)(
    lambda self, step, have: arithmetic.share(self.gradient(step, have))
)


@around("a stage steps with its own sum where it shares weights", worker.SimulatedMachine, "compute", seen=10)
def own_sum_only(self, before, instruction, have, boundary_only):
    tied = Datum("tied", self.seat.stage, None, instruction.step)
    if instruction.op is Op.STEP and tied in have:
        have.put(tied, have[tied._replace(kind="reduced")])
    return before(self, instruction, have, boundary_only)


instead(
    "what an input gradient has added to the sums with rejected weights stays there", core_worker, "SUMMED", seen=177
)(frozenset({"wgrad", "reduced"}))


# --- the store, and lowering ----------------------------------------------------------------------------


around("what is begun of the next step goes with a commit", StepStore, "commit", seen=16)(
    lambda self, before, step: (
        before(self, step),
        self._remove_all(lambda datum: datum.step == step + 1 and datum.kind == "stash"),
    )
)


@around("a promise does not keep a tensor from going for want of room", StepStore, "held", seen=42)
def room_before_promises(self, before):
    sent = dict(self._sent)
    found = before(self)
    self._sent = sent
    return found


@around(
    "a worker that heard of rejected weights takes what comes of an earlier era", StepStore, "discard_after", seen=16
)
def no_era(self, before, after, valid_from):
    own, found = self.valid_from, before(self, after, valid_from)
    self.valid_from = own
    return found


@around("the weights behind a step that was taken back are still said to be here", StepStore, "undo", seen=81)
def both_weights(self, before, step):
    later = Datum("params", self.seat.stage, None, step + 1)
    value = self[later]
    before(self, step)
    self.put(later, value)


around(
    "of what follows a rejected step, only what is behind the next one is void", StepStore, "discard_after", seen=62
)(lambda self, before, after, valid_from: before(self, after + 1, valid_from))


instead("what survivors keep for others is not sent", Recovery, "_kept", seen=5)(lambda self, seat: ())


@around("what is run again for its boundary tensor goes to whom the plan names", Recovery, "_way", seen=64)
def to_the_plans(self, before, seat, datum):
    made, stage = before(self, seat, datum), goes_to(datum, self.plan.stages)
    return made if made.target is None else made._replace(target=self.plan.route[stage, datum.micro_batch])


# --- ends and goodbyes --------------------------------------------------------------------------------


@around("steps are committed when the job has failed", commits, "stepped", seen=336)
def committed_after_failure(state, before, message) -> None:
    ended, state.ending.ended = state.ending.ended, None
    try:
        before(state, message)
    finally:
        state.ending.ended = state.ending.ended or ended


instead(
    "whoever is gone without a goodbye once its leave holds is looked for among the members",
    departures,
    "depart",
    seen=249,
)(lambda state, worker: state.attendance.lose(state.roster.member(worker), Cause.DIED, "is gone", 0.0, state.out))


@mistake("a death at a planned end is a loss", seen=1505)
def loss_at_the_end(monkeypatch) -> None:
    def lose(state, before, *given, **named) -> None:
        with monkeypatch.context() as for_now:
            for_now.setattr(Ending, "through", lambda self, committed: False)
            before(state, *given, **named)

    changed(monkeypatch, losses, "lose", lose)


around("who is cut off waits for the planned end", ControlView, "lose_coordinator", seen=82)(
    lambda self, before: self.end is None and before(self)
)


@mistake("movers take a step that others may have begun for one that nobody has", seen=23)
def bound_too_low(monkeypatch) -> None:
    reached = control_view.is_reached
    monkeypatch.setattr(control_view, "is_reached", lambda step, committed, *more: reached(step, committed - 1, *more))


# --- by a schedule of their own: no seed of the first 2,000 brings them about ----------------------------


def believed_of_many(monkeypatch) -> None:
    """The one that is not heard goes, from however many others the complainer has missed something."""

    def weigh(self, before, member, source, *given):
        return before(self, member, source, *given)._replace(doubted=source.worker)

    changed(monkeypatch, Complaints, "_weigh", weigh)


def evaluations_bound_too_low(monkeypatch) -> None:
    """Movers take an evaluation that others may have begun for one that nobody has."""
    reached = control_view.is_reached
    monkeypatch.setattr(
        control_view, "is_reached", lambda step, committed, evaluated: reached(step, committed, evaluated - 1)
    )


def void_is_not_heard_again(monkeypatch) -> None:
    """Who has found out about a rejection for itself need not hear that what others have computed since is void."""
    changed(
        monkeypatch, StepLedger, "_unheard", lambda self, before, step, held, behind: before(self, step, held, False)
    )
