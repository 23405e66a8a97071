"""The state of a job: all that its coordinator knows, and nothing of what follows from that.

Each part (core/coordinator/facts/) holds the facts of one subject, with the rules on these alone:
* who takes part (attendance.py), which seats are free (vacancies.py), how far newcomers are (joining.py);
* reports for a new generation (regrouping.py), steps (step_ledger.py), arrivals at barriers (barriers.py), posted
  values (boards.py), places of plain iterators (places.py);
* what logs have (logs.py), where they are (log_places.py), and which stages are replayed (replay_under_way.py);
* how the job ends (ending.py).

What a message changes, and what follows for other parts, is in one module per subject, whose functions take the state
first. None of these knows a later one in this list: ends, generations, goodbyes, replays, returns, departures, losses,
comparisons, commits, and those that handle messages.
"""

from __future__ import annotations

from recycle_plugin.core.coordinator.facts.attendance import Attendance
from recycle_plugin.core.coordinator.facts.barriers import Barriers
from recycle_plugin.core.coordinator.facts.boards import Boards
from recycle_plugin.core.coordinator.facts.complaints import Complaints
from recycle_plugin.core.coordinator.facts.ending import Ending
from recycle_plugin.core.coordinator.facts.enrolment import Enrolment
from recycle_plugin.core.coordinator.facts.joining import Joining
from recycle_plugin.core.coordinator.facts.key_values import KeyValues
from recycle_plugin.core.coordinator.facts.log_places import LogPlaces
from recycle_plugin.core.coordinator.facts.logs import Logs
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
    """The state of a job of ``ranks`` ranks. Each fact is in one place, and survives core/coordinator/state_dump.py."""

    def __init__(self, ranks: int) -> None:
        self.now = 0.0  # seconds
        self.out = CoordinatorOutput()  # what the news leads to
        self.ranks = ranks
        self.enrolment = Enrolment(ranks)
        self.job: JobSpec | None = None
        self.attendance = Attendance()
        self.vacancies = Vacancies(ranks)
        self.joining = Joining()
        self.regrouping = Regrouping()
        self.put_off: Generation | None = None  # planned when a step was rejected, to be announced again
        self.left_midway = False  # a worker left whose report others may have waited for
        self.steps = StepLedger()
        self.batches = StepBatches.full(0)  # which replicas contribute, once the job is known
        self.lacked: dict[WorkerId, int] = {}  # how often each had nothing to draw since the last commit
        self.places = Places()
        self.throughput = Throughput()
        self.barriers = Barriers()
        self.boards = Boards()
        self.key_values = KeyValues()
        self.resized_in = -1  # the last generation in which the batch size changed
        self.logs = Logs()
        self.log_places = LogPlaces()
        self.replay = ReplayUnderWay()
        self.recovery_times = RecoveryTimes()
        self.unsaid: dict[int, list[Member]] = {}  # by stage, losses whose recovery was not reported yet
        self.complaints = Complaints()
        self.suspicions = Suspicions()
        self.stood_still = -1  # the last commit at the last regroup after a standstill
        # members whose script has ended without a goodbye (vanishing.py), with how they exited once that is known
        self.vanished: dict[WorkerId, Exited | None] = {}
        self.ending = Ending()
        self.stood_by_elsewhere = False  # whether the coordinator's host may go

    # --- the news that is being handled ----------------------------------------------------------

    def tell(self, whom: Whom, message: object) -> None:
        """Add a message for ``whom``: WORKERS, LAST_STAGE, SUPERVISORS, or one of them."""
        self.out.tell(whom, message)

    def say(self, kind: str, text: str, **details: object) -> None:
        """Add an event for the user."""
        self.out.say(kind, text, **details)

    def fence(self, worker: WorkerId, why: str) -> None:
        """Stop ``worker``: its supervisor kills it, and it is told so itself."""
        self.out.fence(worker, why)

    def taken_out(self) -> CoordinatorOutput:
        """Return the output for the news, and begin a new output."""
        taken, self.out = self.out, CoordinatorOutput()
        return taken

    # --- what follows from several parts ---------------------------------------------------------

    @property
    def roster(self) -> Roster:
        return self.attendance.roster

    def speaker(self, worker: WorkerId) -> Member | None:
        """Return the member or newcomer that ``worker`` is; None for anybody else."""
        newcomer = self.joining.get(worker)
        return newcomer.member if newcomer is not None else self.roster.member(worker)

    @property
    def committed(self) -> int:
        """The last committed step."""
        return self.steps.committed

    @property
    def halted(self) -> bool:
        """Whether the membership in force has lost a worker or is being replaced at once, or too few are left."""
        return self.regrouping.at_once is not None or self.attendance.outnumbered

    def holds(self, generation: int) -> bool:
        """Return whether ``generation`` is in force and not halted."""
        return generation == self.regrouping.in_force and not self.halted

    @property
    def pushed(self) -> bool:
        """Whether scripts call forwards, backwards and steps themselves."""
        return self.job is not None and self.job.pushed

    @property
    def shrinks(self) -> bool:
        """Whether a lost replica's part of each batch is dropped, and nobody else does its work."""
        return self.job is not None and self.job.policy.shrinks

    @property
    def is_ending(self) -> bool:
        """Whether nobody else can join: the end is decided, or a script is through and no stage is to be replayed."""
        return self.ending.ended is not None or (self.ending.finishing and self.replay.waits_since is None)
