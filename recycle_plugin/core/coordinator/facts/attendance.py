"""Attendance: who takes part in a job, who has gone and how, and whether the rest may go on.

* A worker is one process (core/vocabulary/roster.py). A lost worker stays lost. A later process of its rank is another
  worker, and is turned away at once unless core/coordinator/facts/vacancies.py asked for it. A loss takes the whole
  failure domain.
* A stopped or stuck worker (core/coordinator/facts/failure_detector.py) is lost like a dead one, and is *fenced*: its
  supervisor kills it, and it is told so itself in case it wakes up.
* A new generation needs a majority of the seats that are not known to be dead, or half of them with this coordinator
  among them. Otherwise this is the smaller side of a partition, and ends. A death is known when a supervisor saw the
  process end. The broken connection mostly comes first, so there is a grace period in which nothing is committed.

core/coordinator/losses.py decides what follows: a new generation or the job's end.
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
from recycle_plugin.core.messages.said import WORKER, OfWorker
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
    """What is known of a process apart from its membership.

    ``gone``: lost or left. ``dead``: its process is known to have ended. ``late``: it was turned away. ``confused``: it
    is no member, and given up for an impossible message. ``leaving``: it wants to go as soon as nobody counts on it.
    ``reason``: why it has announced that it leaves. ``killed_guard``: the id of its guard, the process that the
    launcher started, if that was killed. ``crash``: the error with which its script ended.
    """

    gone: Gone | None = None
    dead: bool = False
    late: bool = False
    confused: bool = False
    leaving: bool = False
    reason: str | None = None
    killed_guard: int | None = None
    crash: Crashed | None = None


NOTHING = WorkerRecord()  # of a worker of which nothing is known; never changed


class Attendance:
    """The workers of a job, live and gone. ``domain``: the unit that is given up as one, known once the job has
    started. ``through``: the stages in which a worker's script has ended.
    """

    def __init__(self) -> None:
        self.roster = Roster()
        self.through: set[int] = set()
        self.failure_detector = FailureDetector()
        self._records: dict[WorkerId, WorkerRecord] = {}  # of workers of which anything is known
        self._seats: dict[int, Seat] = {}  # by rank, of all initial workers
        self.domain = FailureDomain.SEAT
        self._shape: Topology | None = None
        self._outnumbered_at: float | None = None  # seconds of the detector's clock: too few are left since

    @property
    def started(self) -> bool:
        """Whether the job has started: all its first workers have reported."""
        return self._shape is not None

    def _record(self, worker: WorkerId) -> WorkerRecord:
        return self._records.setdefault(worker, WorkerRecord())

    def _of(self, worker: WorkerId) -> WorkerRecord:
        return self._records.get(worker, NOTHING)

    def _those(self, those: Callable[[WorkerRecord], bool]) -> set[WorkerId]:
        return {worker for worker, record in self._records.items() if those(record)}

    @property
    def lost(self) -> set[WorkerId]:
        """The workers that are lost, for good. Costs a look at each record, as do the next properties."""
        return self._those(lambda record: record.gone is Gone.LOST)

    @property
    def left(self) -> set[WorkerId]:
        return self._those(lambda record: record.gone is Gone.LEFT)

    @property
    def unreachable(self) -> set[WorkerId]:
        """The lost workers that are not known to be dead, but for those whose seat another process has held since."""
        gone = sorted(self._those(lambda record: record.gone is not None))
        last = {worker.rank: worker for worker in gone if worker.rank not in self.roster.ranks}
        return {worker for worker in last.values() if (its := self._of(worker)).gone is Gone.LOST and not its.dead}

    @property
    def leaving(self) -> set[WorkerId]:
        return self._those(lambda record: record.leaving)

    @property
    def killed_guards(self) -> dict[WorkerId, int]:
        """The killed guards' process ids by worker, in order."""
        found = sorted(self._those(lambda record: record.killed_guard is not None))
        return {worker: guard for worker in found if (guard := self._records[worker].killed_guard) is not None}

    @property
    def staying(self) -> Roster:
        return self.roster.without(self.leaving)

    def is_lost(self, worker: WorkerId) -> bool:
        """Return whether ``worker`` is lost."""
        return self._of(worker).gone is Gone.LOST

    @property
    def shape(self) -> Topology:
        """The job's topology, with the current number of micro-batches. AssertionError before the start."""
        assert self._shape is not None
        return self._shape

    @property
    def micro_batches(self) -> int:
        """How many micro-batches each replica brings to a step."""
        return self.shape.micro_batches

    def is_heard(self, message: OfWorker) -> bool:
        """Return whether ``message`` counts: not from a lost, late or confused worker, nor if it comes too early."""
        its = self._records.get(message.worker)  # most have none
        if its is not None and message.BY == WORKER and (its.gone is Gone.LOST or its.late or its.confused):
            return False
        return self._shape is not None or not message.RUNNING

    def named(self, rank: int) -> str:
        """Return the readable name of ``rank``'s worker, also of a lost one."""
        return named(rank, self._seats.get(rank))

    def ranks(self, seat: Seat) -> frozenset[int]:
        """Return all ranks, live or not, that fail together with ``seat``, including those of ``seat``. O(ranks)."""
        whole = self.domain is FailureDomain.REPLICA
        return frozenset(
            rank for rank, its in self._seats.items() if its == seat or (whole and its.replica == seat.replica)
        )

    def together(self, member: Member) -> Group:
        """Return the members that are given up as one with ``member``, itself first."""
        return self.domain.of(member, self.roster)

    def ranks_of_stage(self, stage: int) -> list[int]:
        """Return all ranks of ``stage``, live or not, in order."""
        return sorted(rank for rank, its in self._seats.items() if its.stage == stage)

    @property
    def seats(self) -> list[Seat]:
        return sorted(set(self._seats.values()))

    def seat_of(self, rank: int) -> Seat | None:
        """Return the seat of ``rank``; None before the start, or if the job has no such rank."""
        return self._seats.get(rank)

    def is_gone(self, worker: WorkerId) -> bool:
        """Return whether ``worker`` is lost, has left or was turned away: further reports of its end change nothing."""
        its = self._of(worker)
        return its.gone is not None or its.late

    def view(self, roster: Roster) -> ClusterView:
        """Return the cluster's view in which the seats of ``roster`` are live, except those that still join."""
        assert self._shape is not None
        return ClusterView(self._shape, roster.working)

    def empty_stages(self) -> tuple[int, ...]:
        """Return the stages without a working member that still have something to do."""
        return tuple(stage for stage in self.empty_in(self.roster) if stage not in self.through)

    def empty_in(self, roster: Roster) -> tuple[int, ...]:
        """Return the job's stages that no working seat of ``roster`` holds."""
        assert self._shape is not None
        return roster.empty_stages(self._shape.stages)

    def is_leaving(self, worker: WorkerId) -> bool:
        """Return whether ``worker`` wants to go."""
        return self._of(worker).leaving

    # --- joining ---------------------------------------------------------------------------------

    def begin(self, roster: Roster, job: JobSpec) -> None:
        """Start with the members of ``roster``, which are all there."""
        self.roster, self._shape, self.domain = roster, job.shape, job.domain
        self._seats = roster.seats_by_rank()
        self.failure_detector = FailureDetector(job.deadlines, self.failure_detector.clock, len(roster))
        self.failure_detector.admit(roster.workers)

    def turn_away(self, worker: WorkerId, host: str, step: int, out: CoordinatorOutput) -> None:
        """Tell a process to end now: it came after the start, at ``step``, or has the rank of another process."""
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
            f"a process on {host} wants to be rank {worker.rank}, but {why}; it is told to end. "
            "To take a lost worker's seat, start it with --join",
            rank=worker.rank,
            host=host,
            incarnation=worker.incarnation,
        )
        out.tell(worker, End(0, f"{why}; to take a lost worker's seat, start with --join", failed=True))

    def resize(self, micro_batches: int) -> bool:
        """Set how many micro-batches each replica brings to a step from now on. Return whether that is news."""
        before = self._shape
        assert before is not None, "resized before the start"
        self._shape = replace(before, micro_batches=micro_batches)
        return self._shape != before

    def confuse(self, worker: WorkerId) -> None:
        """Hear no more of a process that is no member and has sent an impossible message."""
        self._record(worker).confused = True

    # --- leaving ---------------------------------------------------------------------------------

    def announce(self, message: Leaving, out: CoordinatorOutput) -> bool:
        """Record that a member wants to leave. Return whether that is news."""
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
        """Make ``roster`` the members, less workers that have gone meanwhile. It has newcomers, and lacks leavers."""
        self.roster = roster.without(self._those(lambda record: record.gone is not None))

    def leave(self, worker: WorkerId) -> None:
        """Remove a worker that has gone of its own will."""
        self._record(worker).gone = Gone.LEFT
        self._remove(worker)

    def await_goodbye(self, worker: WorkerId) -> None:
        """Remove from the members a worker that is about to leave of its own will."""
        self._remove(worker)

    def _remove(self, worker: WorkerId) -> None:
        """Stop counting on a worker that is gone, whether it was still a member or not."""
        self.roster = self.roster.without({worker})
        if worker in self._records:
            self._records[worker].leaving = False
        self.failure_detector.dismiss(worker)

    # --- dying -----------------------------------------------------------------------------------

    def unguarded(self, worker: WorkerId, guard: int) -> None:
        """Record that ``guard``, the process that the launcher started for ``worker``, was killed."""
        self._record(worker).killed_guard = guard

    def lost_early(self, worker: WorkerId) -> None:
        """Record that ``worker`` is lost before the job has started."""
        self._record(worker).gone = Gone.LOST

    def died(self, message: Exited, out: CoordinatorOutput) -> str:
        """Record that a supervisor has seen a worker's process end. Return how it ended, in words."""
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
        """Record a script's error, and report each error once. The worker is lost only once its process ends."""
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
        """Return the errors with which the scripts of ``workers`` ended, in words; "" if none has."""
        errors: dict[str, list[str]] = {}
        for worker in workers:
            if (crash := self._of(worker).crash) is not None:
                errors.setdefault(crash.error, []).append(self.named(worker.rank))
        return "; ".join(
            f"the script{'s' * (len(whose) > 1)} of {' and '.join(whose)} ended with {error}"
            for error, whose in errors.items()
        )

    def crash_after(self, step: int) -> str:
        """Return the errors of scripts that had come to ``step`` or further, in words; "" if there are none."""
        return self.crash(sorted(self._those(lambda each: each.crash is not None and each.crash.step >= step)))

    def crash_in(self, stage: int) -> str:
        """Return the errors of the scripts of lost workers of ``stage``, in words; "" if there are none."""
        return self.crash(sorted(worker for worker in self.lost if self._seats[worker.rank].stage == stage))

    def lose(self, member: Member, cause: Cause, how: str, at: float, out: CoordinatorOutput) -> Group:
        """Give up ``member``; fence and give up the rest of its failure domain. Return them all. ``at``: seconds."""
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
        live = {each.seat for each in self.roster.stage(member.seat.stage) if self.roster.works(each)}
        holder = "seat" if self.roster.shards > 1 else "worker"  # several workers hold a seat
        count = {0: f"no live {holder}", 1: f"one live {holder}"}.get(len(live), f"{len(live)} live {holder}s")
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
        """Whether too few are left for now: nobody goes on until deaths are known or the grace period is over."""
        return self._outnumbered_at is not None

    def outnumbered_without(self, members: int) -> bool:
        """Return whether too few would be left if ``members`` more could not be reached."""
        return len(self.unreachable) + members > len(self.roster) - members

    def enough(self) -> bool:
        """Return whether those left are enough to go on. If not, the grace period begins, if it has not yet."""
        if not self.outnumbered_without(0):
            self._outnumbered_at = None
        elif self._outnumbered_at is None:
            self._outnumbered_at = self.failure_detector.clock
        return not self.outnumbered

    def cut_off(self) -> str:
        """Return why those left have to end if the grace period is over, else ""."""
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
