"""Mistakes about who is healthy: what the campaign has to notice."""

from __future__ import annotations

from recycle_plugin.core.coordinator import stalls
from recycle_plugin.core.coordinator.course import Course
from recycle_plugin.core.coordinator.failure_detector import FailureDetector, Suspicion
from recycle_plugin.core.vocabulary.deadlines import Deadlines
from recycle_plugin.core.vocabulary.roster import Roster
from tests.mistakes import mistake


@mistake("what has cost a worker is a proof against the next", seen=187)
def costly_work_is_proof(monkeypatch) -> None:
    monkeypatch.setattr(FailureDetector, "has_cost", lambda self, work: None)


@mistake("who computes is taken for one that hangs", seen=17)
def nobody_looks_at_the_cpu(monkeypatch) -> None:
    monkeypatch.setattr(Deadlines, "busy_s", Deadlines.instruction_s)


@mistake("a stage's last worker is given up on suspicion", seen=82)
def the_last_worker_is_given_up(monkeypatch) -> None:
    monkeypatch.setattr(Roster, "is_last", lambda self, member: False)


@mistake("a suspicion is acted on at once", seen=17)
def suspicion_is_eviction(monkeypatch) -> None:
    monkeypatch.setattr(Suspicion, "overdue", Suspicion.raised)


@mistake("nobody sees that everybody waits", seen=585)
def nobody_sees_a_standstill(monkeypatch) -> None:
    monkeypatch.setattr(stalls, "see_standstill", lambda course, now, out: None)


@mistake("where everybody waits, the job ends at once", seen=585)
def a_standstill_is_the_end(monkeypatch) -> None:
    real = stalls.see_standstill

    def ends(course: Course, now: float, out: object) -> None:
        course.stood_still = course.committed
        real(course, now, out)

    monkeypatch.setattr(stalls, "see_standstill", ends)
