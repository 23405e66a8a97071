"""Attendance: who takes part in a job, who has gone and how, and whether those left may go on.

* A worker is one process (core/vocabulary/roster.py).  Who is lost stays lost, and a later process of its rank is
  another worker, which comes only where core/coordinator/facts/vacancies.py has asked for it: any other hears so at
  once.  A loss takes its failure domain with it.
* Who is stopped or stuck (core/coordinator/facts/failure_detector.py) is lost as whoever dies, and *fenced*: its
  supervisor kills it, and it hears so itself, should it wake up.
* Of the seats that are not known to be dead a new generation has a majority, or half with this coordinator among them;
  else this is the wrong side of a partition, and it ends.  A death is known when a supervisor saw the process end.  The
  broken connection mostly comes first, so there is a grace before deciding, in which nothing is committed.

What follows for the job, a new generation or its end, core/coordinator/losses.py decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum

from recycle_plugin.core.coordinator.facts.failure_detector import FailureDetector
from recycle_plugin.core.coordinator.facts.output import CoordinatorOutput
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


class Gone(Enum):
    """How a worker has gone: given up by the others, or of its own will."""

    LOST = "lost"
    LEFT = "left"


@dataclass
class WorkerRecord:
    """What is known of a process beside that it takes part.  ``gone``: it was lost, or has left; ``dead``: it is known
    to have ended; ``late``: it came when it could take part no more; ``confused``: it is no member, and given up for
    what it has said.  ``leaving``: it wants to go as soon as nobody counts on it; ``reason``: why it has ever wanted
    to.  ``killed_guard``: the process that the launcher had started for it; ``crash``: what its script has ended with.
    """

    gone: Gone | None = None
    dead: bool = False
    late: bool = False
    confused: bool = False
    leaving: bool = False
    reason: str | None = None
    killed_guard: int | None = None
    crash: Crashed | None = None


NOTHING = WorkerRecord()  # of whom nothing is known; nobody changes it


class Attendance:
    """The workers of a job, live and gone.  ``domain``: the unit that is given up as one, once the job is known;
    ``through``: stages of which somebody's script has come to its end.
    """

    def __init__(self) -> None:
        self.roster = Roster()
        self.through: set[int] = set()
        self.failure_detector = FailureDetector()
        self._records: dict[WorkerId, WorkerRecord] = {}  # of those of whom anything is known
        self._seats: dict[int, Seat] = {}  # by rank, of all that have begun
        self.domain = FailureDomain.SEAT
        self._shape: Topology | None = None
        self._outnumbered_at: float | None = None  # seconds of the detector's clock: since then too few are left

    @property
    def started(self) -> bool:
        """Whether all workers were there once."""
        return self._shape is not None

    def _record(self, worker: WorkerId) -> WorkerRecord:
        """The record of ``worker``, which is made where there is none."""
        return self._records.setdefault(worker, WorkerRecord())

    def _of(self, worker: WorkerId) -> WorkerRecord:
        """The record of ``worker``, or one that says nothing."""
        return self._records.get(worker, NOTHING)

    def _those(self, those: Callable[[WorkerRecord], bool]) -> set[WorkerId]:
        """The workers of ``those`` records.  Costs one look at each worker of whom anything is known."""
        return {worker for worker, record in self._records.items() if those(record)}

    @property
    def lost(self) -> set[WorkerId]:
        """The workers that are lost, for good.  Costs what :meth:`_those` does."""
        return self._those(lambda record: record.gone is Gone.LOST)

    @property
    def left(self) -> set[WorkerId]:
        """The workers that have gone of their own will.  Costs the same."""
        return self._those(lambda record: record.gone is Gone.LEFT)

    @property
    def unreachable(self) -> set[WorkerId]:
        """The lost workers of which nobody knows whether they are dead.  Costs the same."""
        return self._those(lambda record: record.gone is Gone.LOST and not record.dead)

    @property
    def leaving(self) -> set[WorkerId]:
        """The members that want to go.  Costs the same."""
        return self._those(lambda record: record.leaving)

    @property
    def killed_guards(self) -> dict[WorkerId, int]:
        """The guards that were killed, by their workers, in order."""
        found = sorted(self._those(lambda record: record.killed_guard is not None))
        return {worker: guard for worker in found if (guard := self._records[worker].killed_guard) is not None}

    @property
    def staying(self) -> Roster:
        """The members without those that are leaving, in one pass over them."""
        return self.roster.without(self.leaving)

    def is_lost(self, worker: WorkerId) -> bool:
        """Whether ``worker`` is lost."""
        return self._of(worker).gone is Gone.LOST

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
        its = self._of(message.worker)
        unheard = its.gone is Gone.LOST or its.late or its.confused
        return not (unheard and message.BY == WORKER) and (self.started or not message.RUNNING)

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
        its = self._of(worker)
        return its.gone is not None or its.late

    def view(self, roster: Roster) -> ClusterView:
        """The view of the cluster in which the seats of ``roster`` are live, but for those that are still joining."""
        assert self._shape is not None
        return ClusterView(self._shape, roster.working)

    def empty_stages(self) -> tuple[int, ...]:
        """The stages that nobody is at work in, and that still have something to do.  Costs a pass over the members."""
        return tuple(stage for stage in self.view(self.roster).empty_stages() if stage not in self.through)

    def is_leaving(self, worker: WorkerId) -> bool:
        """Whether ``worker`` wants to go."""
        return self._of(worker).leaving

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
        if self._of(worker).late:
            return
        self._record(worker).late = True
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

    def confuse(self, worker: WorkerId) -> None:
        """Hears no more of a process that is no member, and has said what can't be."""
        self._record(worker).confused = True

    # --- leaving ---------------------------------------------------------------------------------

    def announce(self, message: Leaving, out: CoordinatorOutput) -> bool:
        """Notes that a member wants to leave; returns whether that is news."""
        member = self.roster.member(message.worker)
        if member is None or self._of(member.worker).leaving:
            return False
        record = self._record(member.worker)
        record.leaving, record.reason = True, message.reason
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
        for worker, record in sorted(self._records.items(), key=lambda each: each[0]):
            if record.reason is not None:
                reasons.setdefault(record.reason, []).append(self.named(worker.rank))
        return "; ".join(
            f"{' and '.join(whose)} leave{'s' * (len(whose) == 1)}: {reason}" for reason, whose in reasons.items()
        )

    def agreed(self, roster: Roster) -> None:
        """Goes on in a generation of ``roster``: whoever was to leave by then is no member any more, and says goodbye;
        whoever was to join by then is one.
        """
        self.roster = roster.without(self._those(lambda record: record.gone is not None))

    def leave(self, worker: WorkerId) -> None:
        """Removes a worker that has gone of its own will."""
        self._record(worker).gone = Gone.LEFT
        self._remove(worker)

    def await_goodbye(self, worker: WorkerId) -> None:
        """Goes on without a worker that is about to leave of its own will."""
        self._remove(worker)

    def _remove(self, worker: WorkerId) -> None:
        """Removes a worker that is gone, whether it was a member still or not."""
        self.roster = self.roster.without({worker})
        if worker in self._records:
            self._records[worker].leaving = False
        self.failure_detector.dismiss(worker)

    # --- dying -----------------------------------------------------------------------------------

    def unguarded(self, worker: WorkerId, guard: int) -> None:
        """Notes that the process ``guard``, which the launcher had started for ``worker``, was killed."""
        self._record(worker).killed_guard = guard

    def lost_early(self, worker: WorkerId) -> None:
        """Notes that ``worker`` is lost before there is a job."""
        self._record(worker).gone = Gone.LOST

    def died(self, message: Exited, out: CoordinatorOutput) -> str:
        """Notes that its supervisor has seen a worker's process end; returns how, in words."""
        how = f"its process {how_ended(message.code)}"
        record = self._record(message.worker)
        if record.killed_guard is not None and message.code < 0:
            how = f"it went with its guard, process {record.killed_guard}, which was killed"
        record.dead = True
        if record.gone is Gone.LOST:
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
        known = {(each.crash.error, each.crash.trace) for each in self._records.values() if each.crash is not None}
        self._record(message.worker).crash = message
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
            if (crash := self._of(worker).crash) is not None:
                errors.setdefault(crash.error, []).append(self.named(worker.rank))
        return "; ".join(
            f"the script{'s' * (len(whose) > 1)} of {' and '.join(whose)} ended with {error}"
            for error, whose in errors.items()
        )

    def crash_after(self, step: int) -> str:
        """The errors of the scripts that had come to ``step``, in words; empty where there are none."""
        return self.crash(sorted(self._those(lambda each: each.crash is not None and each.crash.step >= step)))

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
        record = self._record(member.worker)
        if record.crash is not None:
            cause, how = Cause.ERROR, f"its script ended with {record.crash.error}"
        record.gone = Gone.LOST
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
