"""Attendance: who takes part in a job, who has gone and how, and whether those left may go on.

* A worker is one process (core/vocabulary/roster.py).  Who is lost stays lost, and a later process of its rank is
  another worker, which comes only where core/coordinator/vacancies.py has asked for it: any other hears so at once.  A
  loss takes its failure domain with it.
* Who is stopped or stuck (core/coordinator/failure_detector.py) is lost as whoever dies, and *fenced*: its supervisor
  kills it, and it hears so itself, should it wake up.
* Of the seats that are not known to be dead a new generation has a majority, or half with this coordinator among them;
  else this is the wrong side of a partition, and it ends.  A death is known when a supervisor saw the process end.  The
  broken connection mostly comes first, so there is a grace before deciding, in which nothing is committed.

What follows for the job, a new generation or its end, core/coordinator/losses.py decides.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from recycle_plugin.core.coordinator.failure_detector import FailureDetector
from recycle_plugin.core.coordinator.output import CoordinatorOutput
from recycle_plugin.core.messages.from_coordinator import End
from recycle_plugin.core.messages.from_workers import (
    Crashed,
    Exited,
    Leaving,
)
from recycle_plugin.core.messages.job_spec import JobSpec
from recycle_plugin.core.messages.of_worker import OfWorker
from recycle_plugin.core.messages.said import WORKER
from recycle_plugin.core.vocabulary.causes import Cause
from recycle_plugin.core.vocabulary.describe import how_ended, named
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.roster import FailureDomain, Group, Member, Roster, WorkerId
from recycle_plugin.core.vocabulary.topology import ClusterView, Topology


class Attendance:
    """The workers of a job, live and gone.  ``domain``: the unit that is given up as one, once the job is known."""

    def __init__(self) -> None:
        self.roster = Roster()
        self.left: set[WorkerId] = set()
        self.lost: set[WorkerId] = set()
        self.dead: set[WorkerId] = set()  # of the lost ones, those known to be
        self.through: set[int] = set()  # stages of which somebody's script has come to its end
        self.late: set[WorkerId] = set()  # came when they could take part no more
        self.confused: set[WorkerId] = set()  # no members, and given up for what they have said
        self.leaving: set[WorkerId] = set()  # members that want to go as soon as nobody counts on them
        # by worker, the process that the launcher had started for it, and that was killed
        self.unguarded: dict[WorkerId, int] = {}
        self.failure_detector = FailureDetector()
        self._seats: dict[int, Seat] = {}  # by rank, of all that have begun
        self._crashes: dict[WorkerId, Crashed] = {}  # what their scripts have ended with
        self._reasons: dict[WorkerId, str] = {}  # why each of those that were leaving ever wanted to
        self.domain = FailureDomain.SEAT
        self._shape: Topology | None = None
        self._outnumbered_at: float | None = None  # seconds of the detector's clock: since then too few are left

    @property
    def started(self) -> bool:
        """Whether all workers were there once."""
        return self._shape is not None

    @property
    def unreachable(self) -> set[WorkerId]:
        """The lost workers of which nobody knows whether they are dead."""
        return self.lost - self.dead

    @property
    def staying(self) -> Roster:
        """The members without those that are leaving, in one pass over them."""
        return self.roster.without(self.leaving)

    @property
    def shape(self) -> Topology:
        """The job's topology, with as many micro-batches as steps have by now; AssertionError before the start."""
        assert self._shape is not None
        return self._shape

    @property
    def micro_batches(self) -> int:
        """How many micro-batches each replica brings to a step."""
        return self.shape.micro_batches

    def is_heard(self, message: OfWorker) -> bool:
        """Whether ``message`` counts.  What a worker says that is lost, came too late or is given up as confused
        changes nothing: it may have been stopped, or cut off, or never have taken part.  Nor does what nobody says
        before the start.
        """
        worker = message.worker
        gone = worker in self.lost or worker in self.late or worker in self.confused
        return not (gone and message.BY == WORKER) and (self.started or not message.RUNNING)

    def named(self, rank: int) -> str:
        """The name of the worker of ``rank`` for people, wherever that worker is by now."""
        return named(rank, self._seats.get(rank))

    def ranks(self, seat: Seat) -> frozenset[int]:
        """The ranks of all that are given up as one with who holds ``seat``, itself included, or did so.  Costs one
        look at each rank.
        """
        whole = self.domain is FailureDomain.REPLICA
        return frozenset(
            rank for rank, its in self._seats.items() if its == seat or (whole and its.replica == seat.replica)
        )

    def together(self, member: Member) -> Group:
        """The members that are given up as one with ``member``, itself first."""
        return self.domain.of(member, self.roster)

    def ranks_of_stage(self, stage: int) -> list[int]:
        """All ranks that have begun in ``stage``, in order."""
        return sorted(rank for rank, its in self._seats.items() if its.stage == stage)

    @property
    def seats(self) -> list[Seat]:
        """The seats of the job, in order."""
        return sorted(set(self._seats.values()))

    def seat_of(self, rank: int) -> Seat | None:
        """The seat of ``rank``; None before the start, and where the job has no such rank."""
        return self._seats.get(rank)

    def is_gone(self, worker: WorkerId) -> bool:
        """Whether ``worker`` is gone, in whatever way; that it goes once more is no news."""
        return worker in self.lost | self.left | self.late

    def view(self, roster: Roster) -> ClusterView:
        """The view of the cluster in which the seats of ``roster`` are live, but for those that are still joining."""
        assert self._shape is not None
        return ClusterView(self._shape, roster.working)

    def empty_stages(self) -> tuple[int, ...]:
        """The stages that nobody is at work in, and that still have something to do.  Costs a pass over the members."""
        return tuple(stage for stage in self.view(self.roster).empty_stages() if stage not in self.through)

    # --- joining ---------------------------------------------------------------------------------

    def begin(self, roster: Roster, job: JobSpec) -> None:
        """Starts with the members of ``roster``, who are all there."""
        self.roster, self._shape, self.domain = roster, job.shape, job.domain
        self._seats = roster.seats_by_rank()
        self.failure_detector = FailureDetector(job.deadlines, self.failure_detector.clock)
        self.failure_detector.admit(roster.workers)

    def turn_away(self, worker: WorkerId, host: str, step: int, out: CoordinatorOutput) -> None:
        """Tells a worker that comes when the job is at ``step``, or has another one's rank, to end at once, instead of
        waiting for the others.
        """
        if worker in self.late:
            return
        self.late.add(worker)
        why = (
            f"the job has started, and is at step {step}"
            if self.started
            else f"another process has rank {worker.rank} already"
        )
        out.say(
            "late",
            f"a process on {host} wants to take part as rank {worker.rank}: {why}; nobody can join yet, and it is told "
            "to end",
            rank=worker.rank,
            host=host,
            incarnation=worker.incarnation,
        )
        out.tell(worker, End(0, f"{why}; nobody can join as rank {worker.rank} yet", failed=True))

    def resize(self, micro_batches: int) -> bool:
        """Takes ``micro_batches`` for the number of each replica in a step from now on; returns whether that is
        news.
        """
        before = self._shape
        assert before is not None, "steps have no other size before the start"
        self._shape = replace(before, micro_batches=micro_batches)
        return self._shape != before

    # --- leaving ---------------------------------------------------------------------------------

    def announce(self, message: Leaving, out: CoordinatorOutput) -> bool:
        """Notes that a member wants to leave; returns whether that is news."""
        member = self.roster.member(message.worker)
        if member is None or member.worker in self.leaving:
            return False
        self.leaving.add(member.worker)
        self._reasons[member.worker] = message.reason
        out.say(
            "leaving",
            f"{member} leaves at the next commit: {message.reason}",
            seat=str(member.seat),
            rank=member.rank,
            why=message.reason,
        )
        return True

    @property
    def why_leaving(self) -> str:
        """The reasons that leaving workers have given, in words."""
        reasons: dict[str, list[str]] = {}
        for worker, reason in sorted(self._reasons.items()):
            reasons.setdefault(reason, []).append(self.named(worker.rank))
        return "; ".join(
            f"{' and '.join(whose)} leave{'s' * (len(whose) == 1)}: {reason}" for reason, whose in reasons.items()
        )

    def agreed(self, roster: Roster) -> None:
        """Goes on in a generation of ``roster``: whoever was to leave by then is no member any more, and says goodbye;
        whoever was to join by then is one.
        """
        self.roster = roster.without(self.lost | self.left)

    def leave(self, worker: WorkerId) -> None:
        """Removes a worker that has gone of its own will."""
        self.left.add(worker)
        self._remove(worker)

    def await_goodbye(self, worker: WorkerId) -> None:
        """Goes on without a worker that is about to leave of its own will."""
        self._remove(worker)

    def _remove(self, worker: WorkerId) -> None:
        """Removes a worker that is gone, whether it was a member still or not."""
        self.roster = self.roster.without({worker})
        self.leaving.discard(worker)
        self.failure_detector.dismiss(worker)

    # --- dying -----------------------------------------------------------------------------------

    def died(self, message: Exited, out: CoordinatorOutput) -> str:
        """Notes that its supervisor has seen a worker's process end; returns how, in words."""
        how = f"its process {how_ended(message.code)}"
        if message.worker in self.unguarded and message.code < 0:
            how = f"it went with its guard, process {self.unguarded[message.worker]}, which was killed"
        self.dead.add(message.worker)
        if message.worker in self.lost:
            out.say(
                "confirmed",
                f"{self.named(message.rank)}: {how}, says its supervisor",
                rank=message.rank,
                code=message.code,
                how=how,
            )
        return how

    def crashed(self, message: Crashed, out: CoordinatorOutput) -> None:
        """Notes that a worker's script has ended with an error, which people see once, whoever else meets it.

        The worker is lost once its process ends.
        """
        known = {(each.error, each.trace) for each in self._crashes.values()}
        self._crashes[message.worker] = message
        if (message.error, message.trace) not in known:
            out.say(
                "error",
                f"the script of {self.named(message.rank)} ended with {message.error}",
                rank=message.rank,
                traceback=message.trace,
            )

    def crash(self, workers: Iterable[WorkerId]) -> str:
        """The errors with which the scripts of ``workers`` have ended, in words; empty where none has."""
        errors: dict[str, list[str]] = {}
        for worker in workers:
            if worker in self._crashes:
                errors.setdefault(self._crashes[worker].error, []).append(self.named(worker.rank))
        return "; ".join(
            f"the script{'s' * (len(whose) > 1)} of {' and '.join(whose)} ended with {error}"
            for error, whose in errors.items()
        )

    def crash_after(self, step: int) -> str:
        """The errors of the scripts that had come to ``step``, in words; empty where there are none."""
        return self.crash(sorted(worker for worker, each in self._crashes.items() if each.step >= step))

    def crash_in(self, stage: int) -> str:
        """The errors of the scripts of the lost workers of ``stage``, in words; empty where there are none."""
        return self.crash(sorted(worker for worker in self.lost if self._seats[worker.rank].stage == stage))

    def lose(self, member: Member, cause: Cause, how: str, at: float, out: CoordinatorOutput) -> Group:
        """Gives up ``member`` and whoever is in its failure domain, and returns them; the others are fenced.  ``at``:
        when that was seen, in seconds.
        """
        first, *others = domain = self.together(member)
        self._lose(first, cause, how, at, out)
        for other in others:
            why = f"it is given up with {member}, which is lost"
            out.fence(other.worker, why)
            self._lose(other, Cause.TOGETHER, why, at, out)
        return domain

    def _lose(self, member: Member, cause: Cause, how: str, at: float, out: CoordinatorOutput) -> None:
        if member.worker in self._crashes:
            cause, how = Cause.ERROR, f"its script ended with {self._crashes[member.worker].error}"
        self.lost.add(member.worker)
        self._remove(member.worker)
        live = self.view(self.roster).live_replicas(member.seat.stage)
        count = {0: "no live worker", 1: "one live worker"}.get(len(live), f"{len(live)} live workers")
        out.say(
            "lost",
            f"{member}: {how}. Stage {member.seat.stage} has {count} left",
            seat=str(member.seat),
            rank=member.rank,
            cause=cause.value,
            how=how,
            seen_at=at,
        )

    # --- enough to go on -------------------------------------------------------------------------

    @property
    def outnumbered(self) -> bool:
        """Whether too few are left for now: nobody goes on until deaths are known, or the grace is over."""
        return self._outnumbered_at is not None

    def enough(self) -> bool:
        """Whether those left are enough to go on, now that somebody is lost or a death is known; if not, the grace
        begins.
        """
        if len(self.unreachable) <= len(self.roster):
            self._outnumbered_at = None
        elif self._outnumbered_at is None:
            self._outnumbered_at = self.failure_detector.clock
        return not self.outnumbered

    def cut_off(self) -> str:
        """The reason why those left have to end, once the grace is over; else empty."""
        if (
            self._outnumbered_at is None
            or self.failure_detector.clock - self._outnumbered_at <= self.failure_detector.deadlines.progress_timeout_s
        ):
            return ""
        return (
            f"{len(self.unreachable)} workers can't be reached and aren't known to be dead, and only "
            f"{len(self.roster)} are left here: "
            "this may be the smaller side of a broken network"
        )
