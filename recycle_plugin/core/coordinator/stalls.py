"""Workers that do nothing: one that is suspected for too long, and all of them if everybody waits.

core/coordinator/facts/failure_detector.py finds suspects. A stage's last worker has a longer deadline than others.
After that the job ends, unless the stage can be replayed.

If most workers fall silent together, it may be the coordinator's own host that hears nothing. To give all of them up
would end the job, so they have until they would end by themselves.
"""

from __future__ import annotations

from recycle_plugin.core.coordinator import ends, generations, losses, replays
from recycle_plugin.core.coordinator.facts.failure_detector import Suspicion
from recycle_plugin.core.coordinator.facts.wait_graph import records, shown, wait_graph
from recycle_plugin.core.coordinator.state import JobState
from recycle_plugin.core.vocabulary.causes import Cause
from recycle_plugin.core.vocabulary.roster import WorkerId

DEAF = "nor of most others, so the coordinator's own host may be cut off"


def see_suspects(state: JobState) -> None:
    """Report new suspicions, and act on those past their deadline."""
    suspicions = _unless_deaf(state, state.attendance.failure_detector.tick(state.now))
    state.suspicions.update(suspicions, state.attendance, state.out)
    for worker, suspicion in suspicions.items():
        if not state.ending.failed:
            _act_on(state, worker, suspicion)


def _unless_deaf(state: JobState, suspicions: dict[WorkerId, Suspicion]) -> dict[WorkerId, Suspicion]:
    """Give silent workers until they would end by themselves if without all of them too few are left to go on."""
    silent = [worker for worker, each in suspicions.items() if each.cause is Cause.SILENT]
    if not silent or not state.attendance.outnumbered_without(len(silent)):
        return suspicions
    limit_s = state.attendance.failure_detector.deadlines.cut_off_s
    return suspicions | {worker: suspicions[worker]._replace(limit_s=limit_s, known=DEAF) for worker in silent}


def _act_on(state: JobState, worker: WorkerId, suspicion: Suspicion) -> None:
    """Give up a worker suspected for too long, or end the job if its stage would be empty and can't be replayed."""
    member, failure_detector = state.roster.member(worker), state.attendance.failure_detector
    if member is not None and state.roster.is_last(member):
        limit_s = failure_detector.deadlines.last_worker_timeout_s
        if suspicion.for_s > limit_s and not replays.why_not(state, (member.seat.stage,)):
            losses.give_up(state, worker, suspicion.cause, f"{suspicion} (deadline {limit_s:.1f} s)")
        elif suspicion.for_s > limit_s:
            ends.end(
                state,
                f"{member}, the last worker of stage {member.seat.stage}: {suspicion} (deadline {limit_s:.1f} s). "
                f"{state.ending.safe_point}. {_say_waits(state)}",
            )
    elif suspicion.overdue:
        failure_detector.has_cost(suspicion.work)
        losses.give_up(state, worker, suspicion.cause, f"{suspicion} (deadline {suspicion.limit_s:.1f} s)")


def see_standstill(state: JobState) -> None:
    """Act if everybody waits. At first a message may be lost, so all regroup and say again what they hold. A second
    time since the same commit it is an error that can't be mended here, and the job ends.
    """
    failure_detector = state.attendance.failure_detector
    standstill_s = failure_detector.standstill_s
    if state.halted or state.ending.failed or standstill_s <= failure_detector.stall_s:
        return
    why, waits = f"all workers have waited for {standstill_s:.1f} s", _say_waits(state)
    if state.stood_still == state.committed:
        ends.end(
            state,
            f"{why}, once more since step {state.committed} was committed. {state.ending.safe_point}. {waits}",
        )
    else:
        state.stood_still = state.committed
        state.say("warning", f"{why}, and none works: all regroup. {waits}")
        generations.regroup(state, "everybody waits")


def _say_waits(state: JobState) -> str:
    """Report who waits for whom, as text and as data. Return the text."""
    edges = wait_graph(state.roster, state.attendance.failure_detector)
    state.say("wait_graph", shown(edges), edges=records(edges))
    return f"Who waits for whom: {shown(edges)}"
