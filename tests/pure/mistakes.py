"""Mistakes in recovery, each to be switched on alone: what the campaign has to notice.

Those of the loop, lineage, step machine and membership change production code; those of what the campaign simulates (sums,
tensors, lines) change that.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Callable

import pytest

from recycle_plugin import planner
from recycle_plugin.core import lineage, loop, membership
from recycle_plugin.core.contributions import NORM
from recycle_plugin.core.dataflow import Datum
from recycle_plugin.core.instruction import Op
from recycle_plugin.core.line import Line
from recycle_plugin.core.membership import Membership
from recycle_plugin.core.step import StepMachine
from recycle_plugin.core.steps import Steps
from recycle_plugin.simulator import cluster, exact, worker

Patch = Callable[[pytest.MonkeyPatch], None]
MISTAKES: dict[str, Patch] = {}
SEEN: dict[str, int] = {}


def mistake(name: str, seen: int = 0) -> Callable[[Patch], Patch]:
    """``seen``: a seed that has shown it, to be tried first."""

    def register(patch: Patch) -> Patch:
        MISTAKES[name], SEEN[name] = patch, seen
        return patch

    return register


def changed_rests(monkeypatch, change: Callable[[lineage.Rest], lineage.Rest]) -> None:
    """Every worker works out other rests of the unfinished steps."""
    monkeypatch.setattr(loop, "unfinished", lambda *given: tuple(map(change, lineage.unfinished(*given))))


def changed_holdings(monkeypatch, keeps: Callable[[object], bool]) -> None:
    """Only what ``keeps`` is true of is taken to have survived."""

    def unfinished(plan, committed, held, void):
        return lineage.unfinished(plan, committed, {seat: frozenset(filter(keeps, have)) for seat, have in held.items()}, void)

    monkeypatch.setattr(loop, "unfinished", unfinished)


# --- lineage and loop ---------------------------------------------------------------------------------


@mistake("no step is taken back", seen=3)
def no_undo(monkeypatch) -> None:
    changed_rests(monkeypatch, lambda rest: replace(rest, undo=frozenset()))


@mistake("a stage does not roll forward", seen=17)
def no_holder(monkeypatch) -> None:
    changed_rests(monkeypatch, lambda rest: replace(rest, holders={}))


@mistake("a weight gradient is left out", seen=2)
def left_out(monkeypatch) -> None:
    def change(rest):
        seat = next((seat for seat, work in sorted(rest.compute.items()) if any(one.op is Op.W for one in work)), None)
        if seat is None:
            return rest
        dropped = next(one for one in rest.compute[seat] if one.op is Op.W)
        return replace(rest, compute=rest.compute | {seat: tuple(one for one in rest.compute[seat] if one != dropped)})

    changed_rests(monkeypatch, change)


@mistake("a step that was taken back is not done again", seen=6)
def not_again(monkeypatch) -> None:
    def change(rest):
        closing = {seat: tuple(one for one in ops if seat not in rest.undo or one.op is not Op.STEP) for seat, ops in rest.closing.items()}
        return replace(rest, closing=closing)

    changed_rests(monkeypatch, change)


@mistake("finished work is counted again", seen=2)
def counted_again(monkeypatch) -> None:
    changed_holdings(monkeypatch, lambda datum: datum.kind != "wgrad")


@mistake("a sum that some hold is forgotten", seen=2)
def sum_forgotten(monkeypatch) -> None:
    changed_holdings(monkeypatch, lambda datum: datum.kind != "reduced")


@mistake("the plan of the first membership is kept", seen=2)
def old_plan(monkeypatch) -> None:
    plan_for = loop.Loop._plan_for

    def first(self, generation):
        self._first = getattr(self, "_first", None) or plan_for(self, generation)
        return self._first

    monkeypatch.setattr(loop.Loop, "_plan_for", first)


def kept_stashes(self, before, step) -> None:
    """A worker that takes ``step`` back."""
    stashes = {datum: value for datum, value in self.have.items() if datum.kind == "stash"}
    before(self, step)
    self.have |= stashes


@mistake("a later step's stash outlives a step that is taken back", seen=42)
def stash_stays(monkeypatch) -> None:
    def stays(held, rest):
        later = {seat: Datum("params", seat.stage, None, rest.step + 1) for seat in rest.undo}
        return {seat: frozenset(datum for datum in have if datum != later.get(seat)) for seat, have in held.items()}

    for module in (lineage, loop):
        monkeypatch.setattr(module, "surviving", stays)
    changed_worker(monkeypatch, "undo", kept_stashes)


@mistake("a later step's stash outlives a step that is taken back until its forward is run again, and another failure comes before that", seen=904)
def stash_lingers(monkeypatch) -> None:
    changed_worker(monkeypatch, "undo", kept_stashes)


@mistake("a STEP does not wait for the commit before it", seen=62)
def record_overwritten(monkeypatch) -> None:
    monkeypatch.setattr(StepMachine, "may_apply", lambda self, step: True)


@mistake("a wait is not interrupted", seen=4)
def deaf(monkeypatch) -> None:
    monkeypatch.setattr(Line, "check", Line.check_end)


# --- membership ---------------------------------------------------------------------------------------


@mistake("a step is committed when one worker has applied it")
def committed_by_one(monkeypatch) -> None:
    def step(self, stepped, now, out) -> None:
        for number in range(self.committed + 1, stepped.step + 1):
            self._commit(number, now, out)

    monkeypatch.setattr(Membership, "_step", step)


@mistake("a report for an older membership counts", seen=5)
def stale_report(monkeypatch) -> None:
    report = Membership._report

    def accept(self, message, now, out) -> None:
        report(self, replace(message, generation=self._awaiting.number) if self._awaiting else message, now, out)

    monkeypatch.setattr(Membership, "_report", accept)


@mistake("what a lost worker says counts", seen=81)
def lost_heard(monkeypatch) -> None:
    monkeypatch.setattr(membership, "OF_MEMBERS", ())


@mistake("whoever goes while the membership changes is waited for", seen=215)
def gone_waited_for(monkeypatch) -> None:
    monkeypatch.setattr(Membership, "_await_without", lambda self, member, early, now, out: None)


@mistake("what is said of a committed step counts", seen=38)
def committed_heard(monkeypatch) -> None:
    contribute = Steps.contribute

    def heard(self, message, out):
        committed, self.committed = self.committed, 0
        try:
            return contribute(self, message, out)
        finally:
            self.committed = committed

    monkeypatch.setattr(Steps, "contribute", heard)


@mistake("the job goes on before all have reported", seen=2)
def first_report(monkeypatch) -> None:
    def report(self, message, now, out) -> None:
        if self._awaiting is not None and message.generation == self._awaiting.number:
            self._reports[message.rank] = message
            for member in self._awaiting.members:
                self._reports.setdefault(member.rank, replace(message, held={}))
            self._go_on(self._awaiting, now, out)

    monkeypatch.setattr(Membership, "_report", report)


@mistake("what a broken line has lost is not sent again", seen=176)
def never_again(monkeypatch) -> None:
    monkeypatch.setattr(Membership, "_send_again", lambda self, missing, now, out: None)


@mistake("a stopped worker is waited for", seen=10)
def patient(monkeypatch) -> None:
    monkeypatch.setattr(Membership, "_give_up", lambda self, rank, why, now, out: None)


# --- the norm that a step waits for -------------------------------------------------------------------


@mistake("a norm is made again after a failure, as if nobody had stepped with the first", seen=77)
def second_norm(monkeypatch) -> None:
    regroup = Membership._regroup

    def regrouped(self, cause, now, out, from_step=0) -> None:
        contributions = self._steps._contributions
        contributions._told = {key for key in contributions._told if key[1] != NORM}
        contributions._values = {key: values for key, values in contributions._values.items() if key[1] != NORM}
        regroup(self, cause, now, out, from_step)

    monkeypatch.setattr(Membership, "_regroup", regrouped)
    handed_out_once(monkeypatch)


@mistake("a norm that was told is forgotten once it was used", seen=196)
def handed_out_once(monkeypatch) -> None:
    monkeypatch.setattr(Line, "collected", lambda self, step, name: self._collected.pop((step, name), None))


# --- sums, tensors, lines -----------------------------------------------------------------------------


def changed_worker(monkeypatch, name: str, change: Callable) -> None:
    before = getattr(worker.Worker, name)
    monkeypatch.setattr(worker.Worker, name, lambda self, *arguments: change(self, before, *arguments))


@mistake("a partial sum is used", seen=2)
def partial_sum(monkeypatch) -> None:
    def reduce(self, before, instruction):
        reduced = worker.Datum("reduced", self.seat.stage, None, instruction.step)
        try:
            yield from before(self, instruction)
        except worker.Died:
            raise
        except BaseException:
            self.have.setdefault(reduced, sum(value for datum, value in self.have.items() if datum.kind == "wgrad" and datum.step == instruction.step))
            raise

    changed_worker(monkeypatch, "_reduce", reduce)


@mistake("sums are divided by the live workers", seen=2)
def wrong_divisor(monkeypatch) -> None:
    def reduce(self, before, instruction):
        yield from before(self, instruction)
        live = sum(member.seat.stage == self.seat.stage for member in self.line.generation.members)
        reduced = worker.Datum("reduced", self.seat.stage, None, instruction.step)
        self.have[reduced] = self.have[reduced] * self.cluster.scenario.shape.replicas * pow(live, -1, exact.PRIME) % exact.PRIME

    changed_worker(monkeypatch, "_reduce", reduce)


@mistake("random numbers belong to the worker", seen=5)
def masks_by_worker(monkeypatch) -> None:
    def compute(self, before, instruction, stages) -> None:
        before(self, instruction, stages)
        made = worker.Datum("act", instruction.stage, instruction.micro_batch, instruction.step)
        if instruction.op is Op.F and made in self.have:
            self.have[made] += self.seat.replica - instruction.micro_batch.replica

    changed_worker(monkeypatch, "_compute", compute)


@mistake("kept tensors go although peers plan with them", seen=2)
def broken_promise(monkeypatch) -> None:
    def held(self, before):
        found = before(self)
        for datum in [datum for datum in self.have if datum.kind in ("act", "grad") and datum.stage == self.seat.stage]:
            del self.have[datum]
        return found

    changed_worker(monkeypatch, "held", held)


@mistake("what takes a step back goes with the step", seen=6)
def no_record(monkeypatch) -> None:
    def compute(self, before, instruction, stages) -> None:
        before(self, instruction, stages)
        if instruction.op is Op.STEP:
            self._before = self.have[worker.Datum("params", self.seat.stage, None, instruction.step + 1)]

    changed_worker(monkeypatch, "_compute", compute)


@mistake("sums are dropped when the step is taken up again", seen=2)
def dropped_sums(monkeypatch) -> None:
    def held(self, before):
        found = before(self)
        for datum in [datum for datum in self.have if datum.kind == "wgrad"][:1]:
            del self.have[datum]
        return found

    changed_worker(monkeypatch, "held", held)


@mistake("tensors do not say of which step they are")
def no_step(monkeypatch) -> None:
    arrive = cluster.Cluster._arrive

    def changed(self, target, datum, value, era) -> None:
        arrive(self, target, datum, value, era)
        arrive(self, target, datum._replace(step=datum.step + 1), value, era)

    monkeypatch.setattr(cluster.Cluster, "_arrive", changed)


# --- exact mode -----------------------------------------------------------------------------------------


@mistake("blocks are added in the order in which they come")
def order_of_arrival(monkeypatch) -> None:
    def total(self, before, brought):
        totals = [total for part in brought for total in part.values()]
        return functools.reduce(lambda found, total: exact.added(found, total, self.cluster.scenario.ordered), totals, 0)

    changed_worker(monkeypatch, "_total", total)


@mistake("a block that a worker has begun goes on with another", seen=243)
def homeless(monkeypatch) -> None:
    def seat_of(self, stage, micro_batch):
        found = [self._where.get(Datum(kind, stage, micro_batch, self._step)) for kind in ("inner", "stash")]
        return next((seats[0] for seats in found if seats), self._plan.route[stage, micro_batch])

    monkeypatch.setattr(lineage._Closure, "_seat_of", seat_of)


@mistake("what is left of a block is added in another order", seen=15)
def turned_round(monkeypatch) -> None:
    arranged = planner.arrange

    def changed(rest, plan, costs, held):
        def turned(program):
            last = iter(sorted((one for one in program if one.op is Op.W), key=lambda one: one.micro_batch, reverse=True))
            return tuple(next(last) if one.op is Op.W else one for one in program)

        return {seat: turned(program) if all(Datum("inner", one.stage, one.micro_batch, one.step) in held[seat] for one in program if one.op is Op.W) else program
                for seat, program in arranged(rest, plan, costs, held).items()}  # fmt: skip

    monkeypatch.setattr(planner, "arrange", changed)


# --- rejected steps -----------------------------------------------------------------------------------


@mistake("what was computed with rejected weights stays", seen=6)
def not_void(monkeypatch) -> None:
    monkeypatch.setattr(worker.Worker, "void", lambda self, after, era: None)


@mistake("a late tensor computed with rejected weights counts", seen=37)
def late_counts(monkeypatch) -> None:
    arrive = worker.Worker.arrive
    monkeypatch.setattr(worker.Worker, "arrive", lambda self, datum, value, era: arrive(self, datum, value, self.era))


@mistake("who has stepped does not hear of a rejection", seen=6)
def unheard(monkeypatch) -> None:
    monkeypatch.setattr(worker.Worker, "judge", lambda self, step, norm: None)


@mistake("a rejected step is committed by a failure that comes at once", seen=6)
def committed_rejected(monkeypatch) -> None:
    monkeypatch.setattr(Steps, "_unheard", lambda self, step, held: False)


@mistake("a norm counts for the worker that has found it only", seen=6)
def unknown_norm(monkeypatch) -> None:
    monkeypatch.setattr(Membership, "_reject", lambda self, step, norm, now, out: None)


# --- weights that stages share ------------------------------------------------------------------------


@mistake("one stage's part of a tied gradient is left out", seen=10)
def part_left_out(monkeypatch) -> None:
    monkeypatch.setattr(worker, "over_tie", lambda by_stage, exact_: exact.over_tie(dict(sorted(by_stage.items())[:-1]), exact_))


@mistake("a tied gradient is made again by those alone who lack it", seen=10)
def by_those_who_lack_it(monkeypatch) -> None:
    def unfinished(plan, committed, held, void):
        def change(rest):
            has = {seat for seat, have in held.items() if Datum("tied", seat.stage, None, rest.step) in have}
            closing = {seat: tuple(one for one in ops if one.op is not Op.TIE or seat not in has) for seat, ops in rest.closing.items()}
            return replace(rest, closing=closing)

        return tuple(map(change, lineage.unfinished(plan, committed, held, void)))

    monkeypatch.setattr(loop, "unfinished", unfinished)


@mistake("a tied weight is in the norm once for each stage", seen=15)
def counted_by_stage(monkeypatch) -> None:
    say_share = worker.Worker._say_share

    def changed(self, step, name) -> None:
        tie, self.tie = self.tie, self.tie and (self.seat.stage,)
        say_share(self, step, name)
        self.tie = tie

    monkeypatch.setattr(worker.Worker, "_say_share", changed)


@mistake("a stage steps with its own sum where it shares weights", seen=10)
def own_sum_only(monkeypatch) -> None:
    def compute(self, before, instruction, stages) -> None:
        tied = Datum("tied", self.seat.stage, None, instruction.step)
        if instruction.op is Op.STEP and tied in self.have:
            self.have[tied] = self.have[tied._replace(kind="reduced")]
        before(self, instruction, stages)

    changed_worker(monkeypatch, "_compute", compute)


# --- ends and goodbyes --------------------------------------------------------------------------------


@mistake("steps are committed when the job has failed", seen=63)
def committed_after_failure(monkeypatch) -> None:
    step = Membership._step

    def stepped(self, message, now, out) -> None:
        ended, self.ended = self.ended, None
        try:
            step(self, message, now, out)
        finally:
            self.ended = self.ended or ended

    monkeypatch.setattr(Membership, "_step", stepped)


@mistake("whoever is gone without a goodbye once its leave holds is looked for among the members", seen=60)
def departed_looked_for(monkeypatch) -> None:
    monkeypatch.setattr(Membership, "_depart", lambda self, rank, out: self.members.pop(rank))


@mistake("a death at a planned end is a loss", seen=269)
def loss_at_the_end(monkeypatch) -> None:
    lose = Membership._lose

    def lost(self, *given) -> None:
        with monkeypatch.context() as for_now:
            for_now.setattr(Membership, "_through", property(lambda self: False))
            lose(self, *given)

    monkeypatch.setattr(Membership, "_lose", lost)


@mistake("who is cut off waits for the planned end", seen=27)
def waits_for_the_end(monkeypatch) -> None:
    lose = Line.lose_coordinator
    monkeypatch.setattr(Line, "lose_coordinator", lambda self: self.end is None and lose(self))
