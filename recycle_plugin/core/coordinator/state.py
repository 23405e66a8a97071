"""The state of a job: all that its coordinator knows, and nothing of what follows from that.

Each part (core/coordinator/facts/) holds one subject's facts, and has the rules on these alone:

* who takes part (attendance.py), whose seats are free (vacancies.py), how far those are who come back (joining.py,
  newcomer_watch.py);
* what the members of a new generation say (regrouping.py), what is known of steps (step_ledger.py), who waits at which
  barrier (barriers.py), what workers post for each other (boards.py), where plain iterators stand (places.py);
* what logs have (logs.py), where they are (log_places.py), and which stages are replayed (replay_under_way.py);
* how the job ends (ending.py).

What a message changes, and what follows for other parts, is in a module for each subject, which takes the state first.
None of these knows of one that stands below it in this list: ends, generations, goodbyes, replays, returns, departures,
losses, comparisons, commits, and those that hear messages.  ``now`` and ``out`` are of the news that is being handled.
"""

from __future__ import annotations

from recycle_plugin.core.coordinator.facts.attendance import Attendance
from recycle_plugin.core.coordinator.facts.barriers import Barriers
from recycle_plugin.core.coordinator.facts.boards import Boards
from recycle_plugin.core.coordinator.facts.complaints import Complaints
from recycle_plugin.core.coordinator.facts.ending import Ending
from recycle_plugin.core.coordinator.facts.enrolment import Enrolment
from recycle_plugin.core.coordinator.facts.joining import Joining
from recycle_plugin.core.coordinator.facts.log_places import LogPlaces
from recycle_plugin.core.coordinator.facts.logs import Logs
from recycle_plugin.core.coordinator.facts.newcomer_watch import NewcomerWatch
from recycle_plugin.core.coordinator.facts.output import CoordinatorOutput, Whom
from recycle_plugin.core.coordinator.facts.places import Places
from recycle_plugin.core.coordinator.facts.recovery_times import RecoveryTimes
from recycle_plugin.core.coordinator.facts.regrouping import Regrouping
from recycle_plugin.core.coordinator.facts.replay_under_way import ReplayUnderWay
from recycle_plugin.core.coordinator.facts.step_ledger import StepLedger
from recycle_plugin.core.coordinator.facts.suspicions import Suspicions
from recycle_plugin.core.coordinator.facts.throughput import Throughput
from recycle_plugin.core.coordinator.facts.vacancies import Vacancies
from recycle_plugin.core.messages.from_coordinator import Generation
from recycle_plugin.core.messages.from_workers import Exited
from recycle_plugin.core.messages.job_spec import JobSpec
from recycle_plugin.core.vocabulary.roster import Member, Roster, WorkerId
from recycle_plugin.core.vocabulary.step_batches import StepBatches


class JobState:
    """The state of a job of so many ``ranks``; each thing is in one place, and survives
    core/coordinator/state_dump.py.
    """

    def __init__(self, ranks: int) -> None:
        self.now = 0.0  # seconds, when the news that is being handled has come
        self.out = CoordinatorOutput()  # what that leads to
        self.ranks = ranks
        self.enrolment = Enrolment(ranks)
        self.job: JobSpec | None = None
        self.attendance = Attendance()
        self.vacancies = Vacancies(ranks)
        self.joining = Joining()
        self.newcomer_watch = NewcomerWatch()
        self.regrouping = Regrouping()
        self.put_off: Generation | None = None  # planned for a later step when a step was rejected
        self.left_midway = False  # somebody has gone whose report others may have waited for
        self.steps = StepLedger()
        self.batches = StepBatches.full(0)  # whose micro-batches each step has, once the job is known
        self.lacked: dict[WorkerId, int] = {}  # how often each had nothing to draw, since the last commit
        self.places = Places()
        self.throughput = Throughput()
        self.barriers = Barriers()
        self.boards = Boards()
        self.resized_in = -1  # the generation in which somebody has planned for another batch size last
        self.logs = Logs()
        self.log_places = LogPlaces()
        self.replay = ReplayUnderWay()
        self.recovery_times = RecoveryTimes()
        self.unsaid: dict[int, list[Member]] = {}  # by stage, who is lost, and it was not said yet which way that goes
        self.complaints = Complaints()
        self.suspicions = Suspicions()
        self.stood_still = -1  # behind which commit all have regrouped since everybody waited
        # members whose script has ended without a goodbye (vanishing.py)
        self.vanished: dict[WorkerId, Exited | None] = {}
        self.ending = Ending()
        self.stood_by_elsewhere = False  # whether the coordinator's host may go

    # --- the news that is being handled ----------------------------------------------------------

    def tell(self, whom: Whom, message: object) -> None:
        """Adds a message for ``whom``: WORKERS, SUPERVISORS, or one of them."""
        self.out.tell(whom, message)

    def say(self, kind: str, text: str, **details: object) -> None:
        """Adds an event for the user."""
        self.out.say(kind, text, **details)

    def fence(self, worker: WorkerId, why: str) -> None:
        """Sees to it that ``worker`` does nothing more: its supervisor kills it, and it hears so itself."""
        self.out.fence(worker, why)

    def taken_out(self) -> CoordinatorOutput:
        """What the news has led to, which is nobody's from now on."""
        taken, self.out = self.out, CoordinatorOutput()
        return taken

    # --- what follows from several parts ---------------------------------------------------------

    @property
    def roster(self) -> Roster:
        """The members."""
        return self.attendance.roster

    def speaker(self, worker: WorkerId) -> Member | None:
        """The member, or the newcomer, that ``worker`` is; None for anybody else."""
        newcomer = self.joining.get(worker)
        return newcomer.member if newcomer is not None else self.roster.member(worker)

    @property
    def committed(self) -> int:
        """The last committed step."""
        return self.steps.committed

    @property
    def halted(self) -> bool:
        """Whether the membership in force has lost somebody, or too few are left."""
        return self.regrouping.at_once is not None or self.attendance.outnumbered

    def holds(self, generation: int) -> bool:
        """Whether ``generation`` is the membership in force, and has lost nobody."""
        return generation == self.regrouping.in_force and not self.halted

    @property
    def pushed(self) -> bool:
        """Whether scripts call forwards, backwards and steps themselves."""
        return self.job is not None and self.job.pushed

    @property
    def shrinks(self) -> bool:
        """Whether who is lost takes its part of each step's batch along, and nobody else does its work."""
        return self.job is not None and self.job.policy.shrinks

    @property
    def is_ending(self) -> bool:
        """Whether the job's end is decided, or a script is through, and no stage is to be replayed: nobody else can
        come to take part.
        """
        return self.ending.ended is not None or (self.ending.finishing and self.replay.waits_since is None)
