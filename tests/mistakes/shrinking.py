"""Mistakes about replicas that are lost whole, and about batches that shrink.

As tests/mistakes; found in jobs whose unit is the replica.
"""

from __future__ import annotations

from dataclasses import replace

from recycle_plugin.core.coordinator.attendance import Attendance
from recycle_plugin.core.coordinator.joining import Joining
from recycle_plugin.core.coordinator.places import Places
from recycle_plugin.core.coordinator.step_ledger import StepLedger
from recycle_plugin.core.vocabulary.roster import FailureDomain
from recycle_plugin.core.vocabulary.step_batches import SUMMED, LiveShare, StepBatches
from recycle_plugin.core.worker.filled_stage import FilledStage
from recycle_plugin.core.worker.training_loop import TrainingLoop
from recycle_plugin.lab.simulator import numbers
from recycle_plugin.lab.simulator.arithmetic import scaled
from recycle_plugin.lab.simulator.simulated_state import SimulatedState
from tests.mistakes import mistake
from tests.mistakes.joining import all_hashes_are_equal


@mistake("a sum is divided for replicas that have contributed nothing", seen=78)
def zeros_counted(monkeypatch) -> None:
    monkeypatch.setattr(numbers, "divided", lambda total, share: total)


@mistake("the learning rate of a step that lacks replicas is scaled twice", seen=78)
def scaled_twice(monkeypatch) -> None:
    monkeypatch.setattr(numbers, "scaled", lambda rate, share: scaled(scaled(rate, share), share))


@mistake("the rate that a newcomer is told of is scaled already", seen=78)
def scaled_settings(monkeypatch) -> None:
    all_hashes_are_equal(monkeypatch)
    monkeypatch.setattr(
        SimulatedState,
        "settings",
        lambda self: scaled(self._machine.numbers.rate, self._machine.numbers.contributing),
    )


@mistake("a newcomer follows steps that lack replicas as if they had all", seen=78)
def followed_as_whole(monkeypatch) -> None:
    all_hashes_are_equal(monkeypatch)
    follow = FilledStage.follow
    monkeypatch.setattr(
        FilledStage, "follow", lambda self, marker, sums: follow(self, replace(marker, share=LiveShare()), sums)
    )


@mistake("what is left of a torn replica steps on", seen=13)
def torn_steps(monkeypatch) -> None:
    monkeypatch.setattr(Attendance, "together", lambda self, member: (member,))


@mistake("a replica takes part before all of it is there", seen=1405)
def half_a_replica(monkeypatch) -> None:
    init = Joining.__init__
    monkeypatch.setattr(Joining, "__init__", lambda self, size=1, domain=FailureDomain.SEAT: init(self))


@mistake("what was lost stays in one stage's sum, and is in another's no more", seen=93)
def sums_stay(monkeypatch) -> None:
    gone = StepBatches.gone
    monkeypatch.setattr(
        StepBatches, "gone", lambda self, have: {datum for datum in gone(self, have) if datum.micro_batch is not None}
    )


@mistake("of a void step the divisor is that of before", seen=78)
def divisor_of_before(monkeypatch) -> None:
    share = StepBatches.share
    monkeypatch.setattr(
        StepBatches,
        "share",
        lambda self, step: LiveShare(self.total, self.total) if step == self.void else share(self, step),
    )


@mistake("what was computed in vain for a step that is void then stays in sums", seen=961)
def strange_stays(monkeypatch) -> None:
    gone = StepBatches.gone

    def without_sums(self, have):
        return {datum for datum in gone(self, have) if datum.kind not in SUMMED or datum.kind == "reduced"}

    monkeypatch.setattr(StepBatches, "gone", without_sums)


@mistake("losses of a void step stay as they were told", seen=93)
def told_losses_stay(monkeypatch) -> None:
    monkeypatch.setattr(StepLedger, "without", lambda self, batches, micro_batches, out: None)


@mistake("a step that has what was lost is finished as if it had not", seen=1623)
def kept_is_forgotten(monkeypatch) -> None:
    program = TrainingLoop._take_up

    def forgetful(self, plan, resume):
        batches = resume.batches
        program(self, plan, resume if batches is None else replace(resume, batches=replace(batches, of_steps={})))

    monkeypatch.setattr(TrainingLoop, "_take_up", forgetful)


@mistake("a void step moves a lost replica's iterator", seen=1972)
def void_moves(monkeypatch) -> None:
    agree = Places.agree
    monkeypatch.setattr(
        Places,
        "agree",
        lambda self, reports, committed, batches, micro_batches: agree(
            self, reports, committed, {step: tuple(range(9)) for step in batches}, micro_batches
        ),
    )
