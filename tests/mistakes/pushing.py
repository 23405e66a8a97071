"""Mistakes about scripts that run their own loops, and about the shards of their replicas.

As tests/mistakes; found in jobs whose scripts push micro-batches.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from recycle_plugin.core.coordinator.facts.places import Places
from recycle_plugin.core.vocabulary.instruction import Op
from recycle_plugin.core.vocabulary.iterator_draws import Place
from recycle_plugin.core.worker.lockstep import Lockstep
from recycle_plugin.core.worker.pushed import Need, PushedWorker, Script
from recycle_plugin.lab.simulator import arithmetic
from recycle_plugin.lab.simulator.pushed_machine import SimulatedPushedMachine
from recycle_plugin.lab.simulator.simulated_worker import SimulatedMachine
from tests.mistakes import around, changed, changed_recovery_plans, instead, mistake


@mistake("a script's boundary does not move when a replica is lost", seen=22)
def boundary_stays(monkeypatch) -> None:
    def own(recovery):
        rest, each = recovery.rest, recovery.plan.view.topology.micro_batches
        mine = rest.home == np.arange(rest.home.shape[1]) // each
        kept = {name: getattr(rest, name) & mine for name in ("forward", "whole", "boundary", "weight")}
        return replace(recovery, rest=replace(rest, **kept))

    changed_recovery_plans(monkeypatch, own)


@around(
    "what a script has given and not run is drawn once more when it is asked for again",
    SimulatedPushedMachine,
    "compute",
    seen=22,
)
def drawn_again(self, before, instruction, have, boundary_only):
    if instruction.op is Op.LOAD and self.given is self._loaded:
        self.draw()
    return before(self, instruction, have, boundary_only)


@around(
    "what a script has run last is counted for the next micro-batch too, behind a failure",
    SimulatedPushedMachine,
    "compute",
    seen=22,
)
def counted_for_the_next(self, before, instruction, have, boundary_only):
    given, last = self.given, getattr(self, "_last", self.given)
    if instruction.op is Op.F:
        self.given = last if self.worker.running.resumed else given
        self._last = given
    try:
        return before(self, instruction, have, boundary_only)
    finally:
        self.given = given


@instead("a script is not told that a micro-batch is the last one of its step", Script, "passing", seen=13)
def boundary_not_told(self):
    yield Need.PASS
    self.gives, self.given = False, self.given + 1


instead("a rank's sum counts before the others of its replica have theirs", Lockstep, "begin_sum", seen=13)(
    lambda self, instruction: iter(())
)


@mistake("a replica steps although one of its ranks lacks its part of the sum", seen=13)
def torn_sum(monkeypatch) -> None:
    begin = Lockstep.begin
    monkeypatch.setattr(Lockstep, "begin_sum", lambda self, instruction: iter(()))
    monkeypatch.setattr(Lockstep, "begin", lambda self, what: iter(()) if "STEP" in what else begin(self, what))


instead("what a script has made of a sum is applied before all have it", SimulatedPushedMachine, "confirm", seen=504)(
    lambda self, step: iter(())
)


@around("each script's own change of a sum is applied", SimulatedPushedMachine, "exchange", seen=13)
def changes_of_their_own(self, before, step):
    given = yield from before(self, step)
    self.taken = step, self.change
    return given


@mistake("each replica judges the norm of its own gradients", seen=22)
def norm_of_one_replica(monkeypatch) -> None:
    def add_up(self, before, instruction, have, holder):
        self._own = self.numbers.total([self.numbers.sums(instruction.step)])
        return (yield from before(self, instruction, have, holder))

    changed(monkeypatch, SimulatedMachine, "add_up", add_up)
    monkeypatch.setattr(SimulatedPushedMachine, "share", lambda self, step, have: arithmetic.share(self._own))


instead("each rank judges the norm of its own part", SimulatedPushedMachine, "norm", seen=22)(
    lambda self, shares: SimulatedMachine.norm(self, dict(list(shares.items())[:1]))
)


@around("a sum that was made again lacks what a script had run before the loss", PushedWorker, "execute", seen=13)
def run_before_is_lost(self, before, program):
    if program.resumed:
        for datum in [datum for datum in self.store if datum.kind == "wgrad"][:1]:
            self.store._remove(datum)
    return before(self, program)


instead(
    "what a script has given to a step counts for the one before, where the membership changes between",
    PushedWorker,
    "place_behind",
    seen=833,
)(lambda self, step: Place(read=self.script.given))
instead(
    "what a lost replica has given to a smaller step that has it is drawn once more", Places, "count_whole", seen=447
)(lambda self, reports, batches, micro_batches: None)
instead(
    "where a replica stands in its data is not asked for when the membership changes", PushedWorker, "places", seen=66
)(property(lambda self: {}))
