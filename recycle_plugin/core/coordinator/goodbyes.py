"""The goodbyes of workers whose scripts are through, in a job that logs: each goes once nobody needs it.

* While a stage that has nobody is replayed, who wants to go waits and helps: the replay may need it.
* Once somebody may go, all steps are committed and all barriers passed, so that nobody needs the others.  A stage that
  is lost whole then is replayed from checkpoint and logs alone, and its next process runs its script to the end without
  them; where that can't be, the job ends as failed, once the others are through.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from recycle_plugin.core.coordinator import returns
from recycle_plugin.core.coordinator.joining import Phase
from recycle_plugin.core.coordinator.output import CoordinatorOutput
from recycle_plugin.core.messages.from_coordinator import MayGo
from recycle_plugin.core.messages.from_workers import Through

if TYPE_CHECKING:
    from recycle_plugin.core.coordinator.course import Course


def through(course: Course, message: Through, out: CoordinatorOutput) -> None:
    """Takes in that a worker's script is through, and lets it go where nobody needs it."""
    course.ending.held.add(message.worker)
    let_go(course, out)


def let_go(course: Course, out: CoordinatorOutput) -> None:
    """Lets those go whose scripts are through, unless a stage is replayed that may need them.  From then on who has
    replayed a stage is a member without a generation: nobody would report for one.
    """
    ending = course.ending
    if course.logs.waits_since is not None and not ending.finishing:
        return
    for worker in sorted(ending.held):
        if (member := course.roster.member(worker)) is not None:
            course.attendance.through.add(member.seat.stage)
            ending.finishing = True
        out.tell(worker, MayGo(course.committed))
    ending.held.clear()
    for newcomer in course.joining if ending.finishing else ():
        worker = newcomer.member.worker
        if newcomer.phase is Phase.REPLAYED and worker in course.roster.workers:
            course.joining.forget(worker)
            course.vacancies.entered(worker)
            course.attendance.failure_detector.observe(worker)
            returns.admit(course, newcomer, out)
