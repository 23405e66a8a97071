"""Workers whose script has called ``os._exit(0)`` between two steps: nothing tells whether that is its end.

Such a worker stays a member, and nobody misses it, until the others show what it is:

* its script's end as any other, where the scripts of all others end after that step too;
* a loss, where anybody is in a later step, waits for somebody, or is lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from recycle_plugin.core.coordinator import departures
from recycle_plugin.core.coordinator.output import CoordinatorOutput
from recycle_plugin.core.messages.activity import WAITS
from recycle_plugin.core.messages.from_workers import Left, Vanishing
from recycle_plugin.core.vocabulary.causes import Cause
from recycle_plugin.core.vocabulary.roster import WorkerId

if TYPE_CHECKING:
    from recycle_plugin.core.coordinator.course import Course

GOES_ON = "its script has called os._exit(0), and others train on"


def vanish(course: Course, message: Vanishing) -> None:
    """Take in that a worker is gone."""
    if course.roster.member(message.worker) is not None:
        course.vanished[message.worker] = None
        course.attendance.failure_detector.dismiss(message.worker)


def resolve(course: Course, now: float, out: CoordinatorOutput) -> None:
    """Take those that have vanished for lost, or for through, once that is known.  Costs one look at each member while
    there are any.
    """
    if not course.vanished:
        return
    vanished = [worker for worker in course.vanished if worker in course.roster.workers]
    if not vanished:
        return
    others = course.roster.workers - set(vanished)
    if course.ending.finishing or course.ending.through(course.committed) or not others:
        course.vanished.clear()
        for worker in vanished:
            left = Left(worker.rank, step=course.committed, incarnation=worker.incarnation)
            departures.goodbye(course, left, now, out)
    elif course.halted or any(_goes_on(course, worker) for worker in others):
        take_for_lost(course, now, out)


def take_for_lost(course: Course, now: float, out: CoordinatorOutput) -> None:
    """Take all who have vanished for lost."""
    while course.vanished:
        worker, exited = course.vanished.popitem()
        course.lose(worker, Cause.DIED, GOES_ON, now, now, out, by_itself=True)
        if exited is not None:
            course.died(exited, now, out)


def _goes_on(course: Course, worker: WorkerId) -> bool:
    """Whether ``worker`` is in a step that is not committed, or waits for others."""
    detector = course.attendance.failure_detector
    last = detector.last(worker)
    if last is None:
        return False
    at, _, for_s = detector.doing(worker)
    return last.step > course.committed or (at == WAITS and for_s > departures.UNEVEN_S)
