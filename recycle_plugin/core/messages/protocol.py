"""The control messages between workers, supervisors and the coordinator; core/messages/encoding.py makes bytes of them,
by their fields' annotations.

Data (activations, gradients) never passes here: a step costs each worker a handful of these messages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from recycle_plugin.core.messages.job_spec import JobSpec
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.iterator_draws import Place
from recycle_plugin.core.vocabulary.roster import Member, Roster, WorkerId
from recycle_plugin.core.vocabulary.step_batches import StepBatches

# exit code of a job that has fallen below recycle.max_slowdown, or was ended from outside: sysexits' "temporary
# failure, try again"
TRY_AGAIN = 75


@dataclass(frozen=True)
class OfWorker:
    """A message from a worker, or about it: ``rank`` and ``incarnation`` say which of the processes that have had its
    rank is meant.
    """

    rank: int
    incarnation: int = field(default=0, kw_only=True)

    @property
    def worker(self) -> WorkerId:
        """The identity of the process that is meant."""
        return WorkerId(self.rank, self.incarnation)


# --- from a worker or its supervisor ---------------------------------------------------------------


@dataclass(frozen=True)
class Hello:
    """The first message of every connection.

    ``role`` is ``worker`` or ``supervisor``, or ``placing``: a supervisor that has no rank of its own yet; or
    ``joining``: one that asks for a lost worker's, and waits for one if it ``waits``; or ``operator``: somebody at a
    terminal, who has no rank.  ``incarnation``: which process of its rank a worker was started as.
    """

    rank: int
    role: str
    pid: int
    host: str
    incarnation: int = 0
    waits: bool = True


@dataclass(frozen=True)
class LogFolder:
    """The folder of a worker's log: its ``path`` on the worker's host, the ``token`` by which all know it who see the
    same folder, and the address of the ``host`` at which others reach that.
    """

    path: str
    token: str
    host: str


@dataclass(frozen=True)
class Ready:
    """A worker's engine stands, and it asks to take part: ``stepped`` steps are applied in its state, and its log is
    ``logged_in`` that folder, if it has one.
    """

    member: Member
    stepped: int
    job: JobSpec
    logged_in: LogFolder | None = None

    @property
    def worker(self) -> WorkerId:
        """The identity of the process that asks."""
        return self.member.worker


@dataclass(frozen=True)
class CatchUp(OfWorker):
    """A newcomer's script has come to the present, and it asks for the state of its stage."""


@dataclass(frozen=True)
class Serving(OfWorker):
    """A worker serves ``newcomer`` at ``address``; the coordinator passes it on to that one."""

    newcomer: WorkerId
    address: str


@dataclass(frozen=True)
class CaughtUp(OfWorker):
    """A newcomer has the state after ``step``, follows the others' steps, and asks to take part.

    ``bytes``: how many of its stage's state it has taken from the others; ``followed``: how many of the sums since;
    ``helpers``: of one that has replayed its stage, how many have helped to the end.
    """

    step: int
    bytes: int
    followed: int
    helpers: int = 0


@dataclass(frozen=True)
class Replaying(OfWorker):
    """A worker has replayed ``step`` from the logs; the coordinator passes it on to those who wait for that."""

    step: int


@dataclass(frozen=True)
class Accompanied(OfWorker):
    """A live worker has replayed its stage up to ``step``, for others that need what it sends, and has its state
    again.
    """

    step: int


@dataclass(frozen=True)
class Unreplayable(OfWorker):
    """A worker can't replay its stage, and ``why``.  ``lacks``: the stage that could make once more what is missing."""

    why: str
    lacks: int | None = None


@dataclass(frozen=True)
class Durable(OfWorker):
    """The checkpoint of ``step`` in the folder ``path`` is whole, on the disk, and was read back.

    The coordinator passes it on to all: what is logged up to ``step`` may go.  ``valid_from``: the generation from
    which data is valid at that worker; ``write_s``: how many seconds the slowest worker has written its share for, 0
    where that is not known; ``boundaries``: those that are to be logged from now on, None for those that are to be
    already.
    """

    step: int
    path: str
    valid_from: int = 0
    write_s: float = 0.0
    boundaries: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Logged(OfWorker):
    """All that a worker has made of the steps up to ``step`` is in its log, on its disk."""

    step: int


@dataclass(frozen=True)
class LogBroken(OfWorker):
    """A worker's log lacks something of ``step``, and ``why``: no stage can be replayed over that step, so not before
    the next checkpoint is durable.
    """

    step: int
    why: str


@dataclass(frozen=True)
class LogsServed:
    """The supervisor of ``rank`` serves what is in the folder with this ``token``, at ``address``."""

    rank: int
    token: str
    address: str


@dataclass(frozen=True)
class StateHash(OfWorker):
    """A hash of a worker's state after ``step``, which the coordinator has asked for."""

    step: int
    digest: str


@dataclass(frozen=True)
class SurvivorReport(OfWorker):
    """A worker has stopped for ``generation``, and says what it has.

    It has applied ``stepped`` steps, made the plan ``digest``, by which a step takes ``period_us``, while no plan's
    takes less than ``bound_us``, and still holds ``held`` (core.vocabulary.dataflow.pack), and of plain iterators' data
    ``held_draws`` (core.vocabulary.iterator_draws.pack).  ``timings``: seconds that it took to notice and to plan.
    ``loaded``: its state is that of a checkpoint that all have loaded.  ``valid_from``: the generation from which data
    is valid there (core/worker/step_store.py).  ``places``: where its plain iterator stood behind the last applied
    step, and behind the next where that was begun, by their numbers; nothing where it does not stand at its replica's
    place, or there is none.  ``ended``: its number, if it has given all that it has, else 0; ``lacks``: the step for
    which this worker has found nothing to draw, 0 for none.
    """

    generation: int
    stepped: int
    digest: str
    held: dict[str, str] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)
    loaded: bool = False
    period_us: int = 0
    bound_us: int = 0
    held_draws: dict[str, str] = field(default_factory=dict)
    valid_from: int = 0
    places: dict[str, Place] = field(default_factory=dict)
    ended: int = 0
    lacks: int = 0


@dataclass(frozen=True)
class OutOfData(OfWorker):
    """A worker has found nothing to draw for ``step``, since its plain iterator has ended, or all have."""

    generation: int
    step: int


@dataclass(frozen=True)
class CheckpointLoaded(OfWorker):
    """A worker has the state of a checkpoint that all were to load."""

    generation: int


@dataclass(frozen=True)
class Resized(OfWorker):
    """A worker plans for another number of micro-batches from the next step on, as all do that have passed the barrier
    before.

    ``batch``: samples in a step of all replicas; ``full_us``: the planned period in microseconds with everybody there.
    """

    generation: int
    micro_batches: int
    batch: int
    full_us: int


@dataclass(frozen=True)
class Stepped(OfWorker):
    """A worker has applied ``step``.  ``place``: where its plain iterator stood when all was drawn for that, None where
    it does not stand at its replica's place, or there is none.
    """

    generation: int
    step: int
    place: Place | None = None


@dataclass(frozen=True)
class Fingerprint(OfWorker):
    """A hash of a worker's state after ``step``; said before :class:`Stepped`.

    ``tied``: of each weight that other stages have too, by name.
    """

    step: int
    digest: str
    tied: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ComputeTime(OfWorker):
    """A worker has computed for ``spent_us`` microseconds in ``step``, and ``nominal_us`` is what that should take;
    said before :class:`Stepped`.

    ``again_us``: the part of the first that went to what had been another worker's, or to what it had computed before.
    """

    step: int
    spent_us: int
    nominal_us: int
    again_us: int = 0


@dataclass(frozen=True)
class Contribution(OfWorker):
    """A worker's part of named numbers of one step that everybody needs (losses by micro-batch, squared norms by
    stage).

    They are complete when ``expected`` keys are there, of each ``shard``.
    """

    step: int
    name: str
    values: dict[str, float]
    expected: int
    shard: int = 0


@dataclass(frozen=True)
class BarrierReached(OfWorker):
    """A worker has reached the barrier named ``place``, outside a step (core/coordinator/barriers.py), with ``values``
    for everybody.
    """

    generation: int
    place: str
    values: dict[str, Any]


@dataclass(frozen=True)
class Leaving(OfWorker):
    """A worker wants to go at a commit line: a planned leave, no failure."""

    reason: str


@dataclass(frozen=True)
class Through(OfWorker):
    """A worker's script is through, in a job that logs: it goes once it hears MayGo."""


@dataclass(frozen=True)
class Left(OfWorker):
    """A worker goes now, after everybody's commit, with exit code ``code``.

    ``planned``: since the step has come before which it was to leave; else its script is through, after ``step``.
    """

    code: int = 0
    planned: bool = False
    step: int = 0


@dataclass(frozen=True)
class Exited(OfWorker):
    """A supervisor saw its worker's process end.  ``code`` is negative for a signal; ``at`` is the time in seconds."""

    code: int
    at: float


@dataclass(frozen=True)
class Unguarded(OfWorker):
    """A supervisor's own guard, the process ``pid`` that the launcher has started for the rank, is gone, and takes the
    worker with it.
    """

    pid: int


@dataclass(frozen=True)
class Heartbeat(OfWorker):
    """A worker's heartbeat, from a thread of its own, every so often: it has finished ``done`` instructions, the last
    ones of ``step``, and ``at`` and ``what`` say what it is doing (core/messages/activity.py).

    ``number`` comes back in :class:`Lease`.
    """

    number: int
    done: int
    at: str
    what: str
    step: int = 0


@dataclass(frozen=True)
class Missing(OfWorker):
    """A worker has waited long for ``what`` from seat ``source``, and both are there: the connection between them is
    broken.

    ``source`` is empty where ``what`` is a collective, which does not say whose connection it is.
    """

    generation: int
    what: str
    source: str


@dataclass(frozen=True)
class SupervisorHeartbeat(OfWorker):
    """A supervisor's heartbeat, every so often: its worker's process is there, whether it is stopped, and how many
    seconds it has used a CPU, or waited for one or for a disk, None where that can't be read.
    """

    stopped: bool
    cpu_s: float | None = None


@dataclass(frozen=True)
class Terminate:
    """Somebody asks for the job's end at the next commit.

    ``host``: where the supervisor of ``rank`` has got what ``reason`` names, a signal; empty: another reason.
    """

    rank: int
    reason: str
    host: str = ""


@dataclass(frozen=True)
class Fatal(OfWorker):
    """A worker has come upon something after which nobody can go on."""

    text: str


@dataclass(frozen=True)
class Crashed(OfWorker):
    """A worker's script has ended with ``error``, in a line, and the process ends with it.

    ``trace``: the traceback, if there is one; ``step``: the last one that was begun.
    """

    error: str
    trace: str = ""
    step: int = 0


@dataclass(frozen=True)
class Note(OfWorker):
    """A worker has something to be said and logged: see :class:`core.coordinator.output.Event`."""

    kind: str
    text: str
    details: dict[str, Any] = field(default_factory=dict)


# --- from an operator ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ask:
    """An operator's request.  ``token``: by which the job knows its own user."""

    token: str


@dataclass(frozen=True)
class AskLeave(Ask):
    """The holder of ``seat`` is to leave as planned."""

    seat: str


@dataclass(frozen=True)
class AskDrain(Ask):
    """All seats on ``host`` are to leave as planned, and nobody is to be started there."""

    host: str


@dataclass(frozen=True)
class AskAdmit(Ask):
    """Somebody is to hold ``seat`` again, which has left as planned, or was given up."""

    seat: str


# --- from the coordinator ------------------------------------------------------------------------


@dataclass(frozen=True)
class RunFolder:
    """The coordinator's answer to an operator's Hello: the whole path of the run folder, empty before the start."""

    path: str


@dataclass(frozen=True)
class Answer:
    """The coordinator's answer to an operator's request, in a sentence: what is done, or why it is not ``done``."""

    text: str
    done: bool


@dataclass(frozen=True)
class Welcome:
    """The coordinator's answer to a Hello: where the job's key-value store listens, the job's name, and how many
    ``ranks`` it has; to a worker also which incarnation of its rank it is.
    """

    store_port: int
    job_id: str
    incarnation: int = 0
    ranks: int = 0


@dataclass(frozen=True)
class Placed:
    """The coordinator's answer to a supervisor that was placing: the rank of its worker."""

    rank: int


@dataclass(frozen=True)
class Seated:
    """The coordinator's answer to a supervisor that was joining: from now on it is the one of ``rank``."""

    rank: int


@dataclass(frozen=True)
class Refused:
    """The coordinator's answer to a supervisor that was joining, for which there is nothing to do: why, and the code
    that it is to end with.
    """

    reason: str
    code: int = 1


@dataclass(frozen=True)
class Restart(OfWorker):
    """To the supervisor of ``rank``, whose last process has ended: start the one of this incarnation after ``after_s``
    seconds.
    """

    after_s: float


@dataclass(frozen=True)
class Stay(OfWorker):
    """To the supervisor of ``rank``: when the process of this incarnation has ended, as planned mostly, there may still
    be a next one, and so it stays; but nobody is on the way, and it may be ended.
    """


@dataclass(frozen=True)
class Generation:
    """A version of the membership.  ``from_step`` 0: it holds at once, leave what you do; otherwise from that step on.

    ``slowness``: seats and percent that were measured, as in core.vocabulary.cost.CostModel.  ``at``: when it was made,
    in seconds.
    """

    number: int
    members: tuple[Member, ...]
    from_step: int
    cause: str
    at: float
    slowness: tuple[tuple[Seat, int], ...] = ()

    @cached_property
    def roster(self) -> Roster:
        """The members as a roster."""
        return Roster(self.members)


@dataclass(frozen=True)
class Resume:
    """Everybody in ``generation`` has reported: go on behind step ``committed``, with what each seat holds of later
    ones.

    ``held``, ``held_draws``: by the seat's text form, as reported.  ``norm``: where the next step was rejected
    (core/coordinator/step_validation.py), why; ``rejected``: not everybody knew that, so what was computed after it
    counts nowhere.  ``placed``: seats whose plain iterators stand at their replicas' places; ``places``: these, by
    replica, as far as they are known; ``ended``: by replica, which of its script's iterators has ended.
    ``unfilled``: the step that the iterators can't fill, since all have ended, and that is dropped; 0 for none.
    ``batches``: whose micro-batches each step has from now on, and which step is void, where that is not all; None:
    it is all.
    """

    generation: int
    committed: int
    held: dict[str, dict[str, str]] = field(default_factory=dict)
    norm: float | None = None
    rejected: bool = False
    held_draws: dict[str, dict[str, str]] = field(default_factory=dict)
    placed: tuple[Seat, ...] = ()
    places: dict[str, Place] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)
    unfilled: int = 0
    batches: StepBatches | None = None


@dataclass(frozen=True)
class Lease:
    """The heartbeat ``number`` has come: until ``for_s`` seconds after it was sent, this worker is not given up for its
    silence.

    To a supervisor: its :class:`Exited` of the process of incarnation ``number`` has come.
    """

    number: int
    for_s: float


@dataclass(frozen=True)
class Fence(OfWorker):
    """The worker of ``rank`` was given up.

    Its supervisor kills it; where it gets this itself, it ends without doing anything more.
    """

    reason: str


@dataclass(frozen=True)
class Serve:
    """A worker is to serve ``newcomer``, which catches up: with the state after ``from_step``, or a later one; and to
    send the hash of the state after that step.
    """

    newcomer: WorkerId
    from_step: int


@dataclass(frozen=True)
class ServeLogs:
    """To the supervisor of ``rank``: serve the segments in ``folder``, also when your worker is dead."""

    rank: int
    folder: LogFolder


@dataclass(frozen=True)
class LogsAt:
    """Where the logs of ``ranks`` are, or some of them: in the folder with this ``token``, which is served at each of
    ``addresses``.
    """

    token: str
    addresses: tuple[str, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Replay:
    """To a newcomer of a stage that nobody holds, or a live worker of one beside it (core/worker/companion.py): take
    the state after ``step`` from the checkpoint in the folder ``path``, and replay the stage from the logs up to
    ``committed``.

    ``stages``: all that are being replayed, whose logs grow meanwhile; ``valid_from``: the generation from which data
    is valid by now; ``passed``: the barriers that all have passed since that step: at others they may be waiting, for
    this worker too; ``helpers``: who is live, and may help; ``logs``: where those are that it needs.
    """

    step: int
    path: str
    committed: int
    stages: tuple[int, ...]
    valid_from: int = 0
    passed: tuple[str, ...] = ()
    helpers: tuple[Member, ...] = ()
    logs: tuple[LogsAt, ...] = ()


@dataclass(frozen=True)
class Beside:
    """To a newcomer that replays its stage: ``members`` are newcomers of that stage too, wait for it, and may help.

    All of them, each time that one has come or gone.
    """

    members: tuple[Member, ...]


@dataclass(frozen=True)
class Expected:
    """To all who wait for stages that nobody holds: ``what`` comes next, with what is predicted of that, in words; who
    waits for it is to do so for at least ``limit_s`` seconds.
    """

    what: str
    limit_s: float


@dataclass(frozen=True)
class LogOnly:
    """To all workers, and to each newcomer: of what crosses the stages log what crosses these ``boundaries``
    (core/vocabulary/log_boundaries.py), and nothing else, from now on.  Who was not told logs all.
    """

    boundaries: tuple[int, ...]


@dataclass(frozen=True)
class Committed:
    """All stages have applied ``step``: its effects stay.

    ``figures``: those of core.coordinator.step_figures, for the user's monitors.
    """

    step: int
    figures: dict[str, float] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Collected:
    """A complete set of contributions: the only one of its step and name, unless that is discarded."""

    step: int
    name: str
    values: dict[str, float]


@dataclass(frozen=True)
class Recorded:
    """What a newcomer's script, which runs from the top, is told of what is over: the mean losses of the steps from
    ``step`` on, and of the evaluations from number ``evaluation`` on.

    ``committed``: the last step that is over; ``unknown``: steps whose loss nobody knows.

    ``refused``: why such a script can't come to the present, or empty.  ``place``: where the plain iterator of its
    replica stood behind ``committed``, as far as is known.  ``unfilled``: the steps before which all data had ended,
    one for each time.
    """

    step: int
    losses: tuple[float, ...]
    evaluation: int
    evaluations: tuple[float, ...]
    committed: int
    unknown: tuple[int, ...] = ()
    refused: str = ""
    place: Place | None = None
    unfilled: tuple[int, ...] = ()


@dataclass(frozen=True)
class BarrierPassed:
    """Everybody has arrived at the barrier named ``place``; nobody has started ``from_step`` yet, or will before
    reading this.  ``values``: what all have brought along.
    """

    place: str
    values: dict[str, Any]
    from_step: int


@dataclass(frozen=True)
class End:
    """The job ends before ``step`` (0: at once); ``failed`` when it could not go on.

    ``code``: of its processes, for the launcher; TRY_AGAIN asks for a checkpoint first.
    """

    step: int
    reason: str
    failed: bool
    code: int = 0


@dataclass(frozen=True)
class MayGo:
    """To a worker whose script is through: all have committed ``step``, the last one, and nobody needs it any more."""

    step: int


@dataclass(frozen=True)
class Over:
    """The job is over: supervisors are to go with ``code`` once their worker is gone."""

    code: int


MESSAGES = (
    # from a worker or its supervisor
    Hello,
    Ready,
    CatchUp,
    Serving,
    CaughtUp,
    Replaying,
    Accompanied,
    Unreplayable,
    Durable,
    Logged,
    LogBroken,
    LogsServed,
    StateHash,
    SurvivorReport,
    OutOfData,
    Fingerprint,
    ComputeTime,
    Stepped,
    Contribution,
    BarrierReached,
    CheckpointLoaded,
    Resized,
    Leaving,
    Through,
    Left,
    Exited,
    Unguarded,
    Heartbeat,
    Missing,
    SupervisorHeartbeat,
    Terminate,
    Fatal,
    Note,
    Crashed,
    # from the coordinator
    Welcome,
    Placed,
    Seated,
    Refused,
    Restart,
    Generation,
    Resume,
    Lease,
    Fence,
    Serve,
    ServeLogs,
    Replay,
    Beside,
    Expected,
    LogOnly,
    Committed,
    Collected,
    BarrierPassed,
    End,
    MayGo,
    Over,
    Recorded,
    Stay,
    # from an operator, and to one
    AskLeave,
    AskDrain,
    AskAdmit,
    RunFolder,
    Answer,
)
