"""Workers whose script has called ``os._exit(0)`` between two steps: is that its end, or a loss?

Such a worker stays a member, and nobody misses it, until the others show what it is:
* its script's end, like any other, if all other scripts end after that step too;
* a loss, if another worker is in a later step, waits for somebody, or is lost.
"""

from __future__ import annotations

from recycle_plugin.core.coordinator import departures, losses
from recycle_plugin.core.coordinator.state import JobState
from recycle_plugin.core.messages.from_workers import Left, Vanishing
from recycle_plugin.core.vocabulary.roster import WorkerId


def vanish(state: JobState, message: Vanishing) -> None:
    """Record that a worker has vanished."""
    if state.roster.member(message.worker) is not None:
        state.vanished[message.worker] = None
        state.attendance.failure_detector.dismiss(message.worker)


def resolve(state: JobState) -> None:
    """Take the vanished workers for lost, or for through, once that is known. O(members) while there are any."""
    if not state.vanished:
        return
    vanished = [worker for worker in state.vanished if worker in state.roster.workers]
    if not vanished:
        return
    others = state.roster.workers - set(vanished)
    if state.ending.finishing or state.ending.through(state.committed) or not others:
        state.vanished.clear()
        for worker in vanished:
            left = Left(worker.rank, step=state.committed, incarnation=worker.incarnation)
            departures.goodbye(state, left)
    elif state.halted or any(_goes_on(state, worker) for worker in others):
        losses.take_vanished_for_lost(state)


def _goes_on(state: JobState, worker: WorkerId) -> bool:
    """Return whether ``worker`` is in a step that is not committed, or waits for others."""
    detector = state.attendance.failure_detector
    last = detector.last(worker)
    return last is not None and (last.step > state.committed or detector.waits_in_vain(worker))
