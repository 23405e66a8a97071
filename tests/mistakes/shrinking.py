"""Mistakes about replicas that are lost whole, and about batches that shrink.

As tests/mistakes; found in jobs whose unit is the replica.
"""

from __future__ import annotations

from dataclasses import replace

from recycle_plugin.core.coordinator.facts.attendance import Attendance
from recycle_plugin.core.coordinator.facts.joining import Joining
from recycle_plugin.core.coordinator.facts.places import Places
from recycle_plugin.core.coordinator.facts.step_ledger import StepLedger
from recycle_plugin.core.vocabulary.roster import FailureDomain
from recycle_plugin.core.vocabulary.step_batches import SUMMED, LiveShare, StepBatches
from recycle_plugin.core.worker.filled_stage import FilledStage
from recycle_plugin.core.worker.training_loop import TrainingLoop
from recycle_plugin.lab.simulator import numbers
from recycle_plugin.lab.simulator.arithmetic import scaled
from recycle_plugin.lab.simulator.simulated_state import SimulatedState
from tests.mistakes import around, instead
from tests.mistakes.joining import all_hashes_are_equal, followed_with

instead("a sum is divided for replicas that have contributed nothing", numbers, "divided", seen=78)(
    lambda total, share: total
)
instead("the learning rate of a step that lacks replicas is scaled twice", numbers, "scaled", seen=78)(
    lambda rate, share: scaled(scaled(rate, share), share)
)
instead(
    "the rate that a newcomer is told of is scaled already",
    SimulatedState,
    "settings",
    seen=78,
    also=all_hashes_are_equal,
)(lambda self: scaled(self._machine.numbers.rate, self._machine.numbers.contributing))
around(
    "a newcomer follows steps that lack replicas as if they had all",
    FilledStage,
    "follow",
    seen=78,
    also=all_hashes_are_equal,
)(followed_with(share=LiveShare()))
instead("what is left of a torn replica steps on", Attendance, "together", seen=13)(lambda self, member: (member,))
around("a replica takes part before all of it is there", Joining, "__init__", seen=1405)(
    lambda self, before, size=1, domain=FailureDomain.SEAT: before(self)
)
around("what was lost stays in one stage's sum, and is in another's no more", StepBatches, "gone", seen=93)(
    lambda self, before, have: {datum for datum in before(self, have) if datum.micro_batch is not None}
)
around("of a void step the divisor is that of before", StepBatches, "share", seen=78)(
    lambda self, before, step: LiveShare(self.total, self.total) if step == self.void else before(self, step)
)


@around("what was computed in vain for a step that is void then stays in sums", StepBatches, "gone", seen=961)
def strange_stays(self, before, have):
    return {datum for datum in before(self, have) if datum.kind not in SUMMED or datum.kind == "reduced"}


instead("losses of a void step stay as they were told", StepLedger, "without", seen=93)(
    lambda self, batches, micro_batches, out: None
)


@around("a step that has what was lost is finished as if it had not", TrainingLoop, "_take_up", seen=1623)
def kept_is_forgotten(self, before, plan, resume):
    batches = resume.batches
    before(self, plan, resume if batches is None else replace(resume, batches=replace(batches, of_steps={})))


around("a void step moves a lost replica's iterator", Places, "agree", seen=1972)(
    lambda self, before, reports, committed, batches, micro_batches: before(
        self, reports, committed, {step: tuple(range(9)) for step in batches}, micro_batches
    )
)
