"""Mistakes about who is healthy: what the campaign has to notice."""

from __future__ import annotations

from math import inf

from recycle_plugin.core.coordinator import stalls
from recycle_plugin.core.coordinator.facts.failure_detector import FailureDetector, Suspicion
from recycle_plugin.core.coordinator.state import JobState
from recycle_plugin.core.vocabulary.deadlines import Deadlines
from recycle_plugin.core.vocabulary.roster import Roster
from tests.mistakes import around, instead, mistake

instead("what has cost a worker is a proof against the next", FailureDetector, "has_cost", seen=187)(
    lambda self, work: None
)
instead("who computes is taken for one that hangs", Deadlines, "busy_s", seen=17)(Deadlines.instruction_s)
instead("a stage's last worker is given up on suspicion", Roster, "is_last", seen=82)(lambda self, member: False)
instead("a suspicion is acted on at once", Suspicion, "overdue", seen=17)(Suspicion.raised)
around("who was not suspect once is not looked at again", FailureDetector, "_suspicions", seen=14)(
    lambda self, before: (before(self), setattr(self, "_quiet_until", inf))[0]
)
instead("nobody sees that everybody waits", stalls, "see_standstill", seen=585)(lambda state: None)


@mistake("where everybody waits, the job ends at once", seen=585)
def a_standstill_is_the_end(monkeypatch) -> None:
    real = stalls.see_standstill

    def ends(state: JobState) -> None:
        state.stood_still = state.committed
        real(state)

    monkeypatch.setattr(stalls, "see_standstill", ends)
