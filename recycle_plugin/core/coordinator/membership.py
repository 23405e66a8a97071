"""The coordinator's decisions: what each news leads to, as a state machine without clock, threads or sockets.

Messages go in, addressed messages and events come out; ``runtime.control.coordinator`` carries them.  What is known is
in core/coordinator/state.py, what is done with a message of each class in core/coordinator/handlers.py, and what else
follows from whatever has come is done here, in the same order each time:

* A job starts when all ranks are there, and want the same (core/coordinator/facts/enrolment.py).
* What the members of a generation have in common when all have reported is committed, and what is left is finished
  from what is held (core/vocabulary/recovery_plan.py).
* Barriers and complaints that belong to an older generation, or to one that has lost somebody, are dropped; what is
  said of a step is of that step, whoever is live, and the first complete word on it stays
  (core/messages/contributions.py).
* What can't be is said by nobody who goes on with the others (core/coordinator/words.py).
* What all have to hear of at one step, a rejection, a checkpoint or another batch size, is a generation that holds at
  once.
* Who is suspected for too long is given up, but for a stage's last worker, without whom the job ends: that has a longer
  deadline.
* Where everybody waits and nobody does anything, all regroup, by which what was lost is sent once more; if they
  stand still again before another commit, the job ends.
* The job ends where workers contradict each other, where a stage that has nobody left can't be replayed, where it has
  become too slow for the user, and where all have left.
"""

from __future__ import annotations

from recycle_plugin.core.coordinator import (
    departures,
    ends,
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
from recycle_plugin.core.coordinator.facts.output import CoordinatorOutput
from recycle_plugin.core.coordinator.state import JobState
from recycle_plugin.core.messages.from_coordinator import Answer, End
from recycle_plugin.core.messages.from_operators import Ask
from recycle_plugin.core.vocabulary.roster import Roster, WorkerId


class Membership:
    """The decisions of a job of so many ``ranks``: who takes part, which step is committed, and what everybody does
    next.  ``now`` is in seconds everywhere.
    """

    def __init__(self, ranks: int) -> None:
        self.state = JobState(ranks)

    # --- what is known ---------------------------------------------------------------------------

    @property
    def started(self) -> bool:
        """Whether all workers were there once."""
        return self.state.attendance.started

    @property
    def roster(self) -> Roster:
        """The members."""
        return self.state.roster

    @property
    def lost(self) -> set[WorkerId]:
        """The workers that are lost."""
        return self.state.attendance.lost

    @property
    def unreachable(self) -> set[WorkerId]:
        """The lost workers of which nobody knows whether they are dead."""
        return self.state.attendance.unreachable

    @property
    def empty(self) -> frozenset[int]:
        """The ranks of vacant seats for which nobody has come yet."""
        return self.state.vacancies.empty

    @property
    def ended(self) -> End | None:
        """The way in which the job ends, once that is decided."""
        return self.state.ending.ended

    @property
    def committed(self) -> int:
        """The last step that stays."""
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
        """The paths of the checkpoints that may be named as safe, and that stages are replayed from."""
        return tuple(self.state.ending.checkpoints)

    def identify(self, claimed: WorkerId) -> WorkerId:
        """The identity of a process that connects as ``claimed``, which another one may be already."""
        return self.state.vacancies.identify(claimed)

    def is_outside(self, worker: WorkerId) -> bool:
        """Whether the job has started, and goes on without ``worker``, which is no member yet."""
        return self.state.vacancies.is_outside(worker)

    def is_apart(self, worker: WorkerId) -> bool:
        """Whether ``worker`` does not hear what is said to all: it is lost, or a newcomer that has not asked yet to
        take part.
        """
        return self.state.attendance.is_lost(worker) or (
            self.is_outside(worker) and self.state.joining.get(worker) is None
        )

    # --- news ------------------------------------------------------------------------------------

    def receive(self, message: object, now: float) -> CoordinatorOutput:
        """Handles one message that arrived at ``now``; returns what it leads to."""
        self.state.now = now
        handlers.handle(self.state, message)
        return self._settled()

    def tick(self, now: float) -> CoordinatorOutput:
        """Handles that time has passed, which may show who is stopped or stuck, that nobody does anything, or that
        those left are cut off.  To be told every ``core.vocabulary.deadlines.TICK_S``; costs one look at each worker.
        """
        state = self.state
        state.now = now
        if not state.ending.failed:
            stalls.see_suspects(state)
            stalls.see_standstill(state)
            departures.see_uneven(state)
            returns.call_off_late(state)
            replays.call_off_late(state)
            ends.see_cut_off(state)
            replays.see_gone(state)
            returns.see_gone(state)
        return self._settled()

    def greet(self, worker: WorkerId, host: str) -> CoordinatorOutput:
        """Handles that a process on ``host`` has connected as ``worker``."""
        starting.greet(self.state, worker, host)
        return self._settled()

    def connection_lost(self, worker: WorkerId, now: float) -> CoordinatorOutput:
        """Handles that a worker's connection broke without a goodbye."""
        self.state.now = now
        losses.cut_off(self.state, worker)
        return self._settled()

    def supervisor(self, rank: int, there: bool, now: float) -> CoordinatorOutput:
        """Handles that the supervisor of ``rank`` has come, or has gone where it is not ``there``."""
        self.state.now = now
        if there:
            supervisors.come(self.state, rank)
        else:
            self.state.vacancies.unsupervised(rank, now)
        return self._settled()

    def join(self, number: int, host: str, waits: bool, now: float) -> CoordinatorOutput:
        """Handles that a supervisor on ``host``, the ``number``-th that does, asks for the seat of a lost worker; if it
        ``waits``, it takes the next one that is lost.
        """
        self.state.now = now
        supervisors.join(self.state, number, host, waits)
        return self._settled()

    def joiner_gone(self, number: int) -> None:
        """Handles that a supervisor is gone which has asked for a seat, and has none."""
        self.state.vacancies.joiner_gone(number)

    def asked(self, request: Ask, now: float) -> tuple[Answer, CoordinatorOutput]:
        """Handles an operator's request."""
        self.state.now = now
        answer = operating.answer(self.state, request)
        return answer, self._settled()

    def fail(self, text: str) -> CoordinatorOutput:
        """Ends the job, since nobody can go on, for a reason that is no worker's."""
        ends.end(self.state, text)
        return self._settled()

    def removed(self, path: str) -> CoordinatorOutput:
        """Handles that the checkpoint at ``path`` is there no more."""
        replayable.removed(self.state, path)
        return self._settled()

    def regroup_overdue(self, seconds: float) -> CoordinatorOutput:
        """Handles that the deadline of a regrouping, ``seconds``, has passed."""
        resuming.overdue(self.state, seconds)
        return self._settled()

    def _settled(self) -> CoordinatorOutput:
        """What the news has led to, once nothing more follows from it: who has gone is not waited for, and those go on
        together who have all reported.
        """
        vanishing.resolve(self.state)
        while self.state.left_midway:
            self.state.left_midway = False
            resuming.complete(self.state)
            vanishing.resolve(self.state)
        return self.state.taken_out()
