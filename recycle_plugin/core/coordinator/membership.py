"""The coordinator's decisions: what each news leads to, as a state machine without clock, threads or sockets.

Messages go in, addressed messages and events come out; runtime/control/coordinator.py carries them. The state is in
core/coordinator/state.py, the handlers of messages in core/coordinator/handlers.py. What else follows from any news is
done here, in the same order each time:

* A job starts when all ranks are there and want the same (core/coordinator/facts/enrolment.py).
* When all members of a generation have reported, the steps that all have applied are committed, and the rest is
  finished from what is held (core/vocabulary/recovery_plan.py).
* Barriers and complaints of an older generation, or of one that has lost a worker, are dropped. Contributions to a step
  belong to that step, whoever is live, and the first complete set stays (core/messages/contributions.py).
* A worker that sends an impossible message is given up (core/coordinator/words.py).
* What all must hear of at the same step (a rejection, a checkpoint, another batch size) is a generation that holds at
  once.
* A worker that is suspected for too long is given up. A stage's last worker has a longer deadline; after that the stage
  is replayed, or the job ends.
* If all wait and nobody does anything, all regroup, so lost messages are sent again. If they stand still again before
  another commit, the job ends.
* The job ends if workers contradict each other, if an empty stage can't be replayed, if a worker reports that it has
  become too slow for its user, or when all have left.
"""

from __future__ import annotations

from recycle_plugin.core.coordinator import (
    departures,
    ends,
    generations,
    handlers,
    losses,
    operating,
    replayable,
    replays,
    resuming,
    returns,
    stalls,
    starting,
    supervisors,
    vanishing,
)
from recycle_plugin.core.coordinator.facts.output import LAST_STAGE, CoordinatorOutput, Whom
from recycle_plugin.core.coordinator.state import JobState
from recycle_plugin.core.messages.from_coordinator import Answer, End
from recycle_plugin.core.messages.from_operators import Ask
from recycle_plugin.core.vocabulary.describe import BROKEN
from recycle_plugin.core.vocabulary.roster import Roster, WorkerId


class Membership:
    """The decisions of a job of ``ranks`` ranks: its members, commits and next generation. ``now``: seconds."""

    def __init__(self, ranks: int) -> None:
        self.state = JobState(ranks)

    # --- what is known ---------------------------------------------------------------------------

    @property
    def started(self) -> bool:
        """Whether all workers have been there once."""
        return self.state.attendance.started

    @property
    def roster(self) -> Roster:
        return self.state.roster

    @property
    def lost(self) -> set[WorkerId]:
        return self.state.attendance.lost

    @property
    def unreachable(self) -> set[WorkerId]:
        """See Attendance.unreachable."""
        return self.state.attendance.unreachable

    @property
    def empty(self) -> frozenset[int]:
        """The ranks of vacant seats whose newcomer has not connected."""
        return self.state.vacancies.empty

    @property
    def ended(self) -> End | None:
        """How the job ends, once decided."""
        return self.state.ending.ended

    @property
    def committed(self) -> int:
        """The last committed step."""
        return self.state.committed

    @property
    def generation(self) -> int:
        """The number of the newest generation; -1 before the start."""
        return self.state.regrouping.generation

    @property
    def regrouping(self) -> int | None:
        """The generation that members are reporting for at once, if any."""
        return self.state.regrouping.at_once

    @property
    def checkpoints(self) -> tuple[str, ...]:
        """The paths of checkpoints that may be named as safe, and from which stages are replayed."""
        return tuple(self.state.ending.checkpoints)

    def identify(self, claimed: WorkerId) -> WorkerId:
        """Return the identity of a process that connects as ``claimed``. Another process may have that identity
        already.
        """
        return self.state.vacancies.identify(claimed)

    def is_outside(self, worker: WorkerId) -> bool:
        """Return whether the job has started and ``worker`` has never been a member."""
        return self.state.vacancies.is_outside(worker)

    def is_apart(self, worker: WorkerId) -> bool:
        """Return whether ``worker`` gets nothing that is sent to all: it is lost, or has not asked to take part."""
        return self.state.attendance.is_lost(worker) or (
            self.is_outside(worker) and self.state.joining.get(worker) is None
        )

    def is_of(self, whom: Whom, worker: WorkerId) -> bool:
        """Return whether messages to ``whom``, WORKERS or LAST_STAGE, go to ``worker``."""
        state = self.state
        if whom == LAST_STAGE and state.job is not None:
            seat = state.attendance.seat_of(worker.rank)
            if seat is None or seat.stage != state.job.stages - 1:
                return False
        return not self.is_apart(worker)

    # --- news ------------------------------------------------------------------------------------

    def receive(self, message: object, now: float) -> CoordinatorOutput:
        """Handle one message that arrived at ``now``. Return the resulting messages and events."""
        self.state.now = now
        handlers.handle(self.state, message)
        return self._settled()

    def tick(self, now: float) -> CoordinatorOutput:
        """Let time pass; to be called every ``core.vocabulary.deadlines.TICK_S``. O(members)."""
        state = self.state
        state.now = now
        if not state.ending.failed:
            starting.see_awaited(state)
            stalls.see_suspects(state)
            stalls.see_standstill(state)
            departures.see_uneven(state)
            returns.call_off_late(state)
            replays.call_off_late(state)
            ends.see_cut_off(state)
            replays.see_gone(state)
            returns.see_gone(state)
            generations.follow(state)
        return self._settled()

    def greet(self, worker: WorkerId, host: str) -> CoordinatorOutput:
        """Handle that a process on ``host`` has connected as ``worker``."""
        starting.greet(self.state, worker, host)
        return self._settled()

    def connection_lost(self, worker: WorkerId, now: float, how: str = BROKEN) -> CoordinatorOutput:
        """Handle that a worker's connection broke without a goodbye, or is about to (``how``)."""
        self.state.now = now
        losses.cut_off(self.state, worker, how)
        return self._settled()

    def supervisor(self, rank: int, there: bool, now: float) -> CoordinatorOutput:
        """Handle that the supervisor of ``rank`` has come, or has gone if it is not ``there``."""
        self.state.now = now
        if there:
            supervisors.come(self.state, rank)
        else:
            self.state.vacancies.unsupervised(rank, now)
        return self._settled()

    def join(self, number: int, host: str, waits: bool, now: float) -> CoordinatorOutput:
        """Handle the request of supervisor ``number``, on ``host``, for a seat. ``waits``: also for a later vacancy."""
        self.state.now = now
        supervisors.join(self.state, number, host, waits)
        return self._settled()

    def joiner_gone(self, number: int) -> None:
        """Handle that a supervisor that has asked for a seat and got none is gone."""
        self.state.vacancies.joiner_gone(number)

    def asked(self, request: Ask, now: float) -> tuple[Answer, CoordinatorOutput]:
        """Handle an operator's request."""
        self.state.now = now
        answer = operating.answer(self.state, request)
        return answer, self._settled()

    def fail(self, text: str) -> CoordinatorOutput:
        """End the job for a reason that is no worker's."""
        ends.end(self.state, text)
        return self._settled()

    def removed(self, path: str) -> CoordinatorOutput:
        """Handle that the checkpoint at ``path`` was removed."""
        replayable.removed(self.state, path)
        return self._settled()

    def regroup_overdue(self, seconds: float) -> CoordinatorOutput:
        """Handle that the deadline of a regroup, ``seconds``, has passed."""
        resuming.overdue(self.state, seconds)
        return self._settled()

    def _settled(self) -> CoordinatorOutput:
        """Return what the news has led to, after resolving vanished workers and the regroup that a leave may have
        completed.
        """
        state = self.state
        vanishing.resolve(state)
        while state.left_midway:
            state.left_midway = False
            resuming.complete(state)
            vanishing.resolve(state)
        return state.taken_out()
