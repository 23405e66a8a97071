"""What workers and their supervisors tell the coordinator."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from recycle_plugin.core.messages.job_spec import JobSpec
from recycle_plugin.core.messages.of_worker import OfWorker
from recycle_plugin.core.messages.said import SUPERVISOR, ToCoordinator
from recycle_plugin.core.vocabulary.iterator_draws import Place
from recycle_plugin.core.vocabulary.losses import Loss
from recycle_plugin.core.vocabulary.roster import Member, WorkerId

ALWAYS = -1  # the generation of what is posted for as long as the job goes on


@dataclass(frozen=True)
class Hello:
    """The first message of every connection.

    ``role`` is ``worker`` or ``supervisor``, or ``placing``: a supervisor that has no rank of its own yet; or
    ``joining``: one that asks for a lost worker's, and waits for one if it ``waits``; or ``operator``: somebody at a
    terminal, who has no rank; or ``standby``: a process that takes the coordinator's place if that dies.
    ``incarnation``: which process of its rank a worker was started as.  ``line``: it goes on with that connection,
    over which ``heard`` messages have come to it, and of which it has the ``token``; -1 for a new one.  ``term``: the
    last that it has heard of (core/coordinator/succession.py).  ``port``: where one that stands by on another host
    listens, 0 on the coordinator's.
    """

    rank: int
    role: str
    pid: int
    host: str
    incarnation: int = 0
    waits: bool = True
    line: int = -1
    heard: int = 0
    token: str = ""
    term: int = 0
    port: int = 0


@dataclass(frozen=True)
class LogFolder:
    """The folder of a worker's log: its ``path`` on the worker's host, the ``token`` by which all know it who see the
    same folder, and the address of the ``host`` at which others reach that.
    """

    path: str
    token: str
    host: str


@dataclass(frozen=True)
class Ready(ToCoordinator):
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
    ``helpers``: of one that has replayed its stage, how many have helped to the end; ``sources``: those of the others
    whose sums it follows.
    """

    step: int
    bytes: int
    followed: int
    helpers: int = 0
    sources: tuple[WorkerId, ...] = ()


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
    """A worker can't replay its stage, and ``why``.  ``lacks``: the stage that could make once more what is missing;
    ``checkpoint``: the path of the one that can't be read.
    """

    why: str
    lacks: int | None = None
    checkpoint: str = ""


@dataclass(frozen=True)
class Durable(OfWorker, running=True):
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
class LogsServed(ToCoordinator, by=SUPERVISOR):
    """The supervisor of ``rank`` serves what is in the folder with this ``token``, at ``address``."""

    rank: int
    token: str
    address: str


@dataclass(frozen=True)
class StrangersAtLogs(ToCoordinator, by=SUPERVISOR):
    """To a port of the supervisor of ``rank`` somebody has come from ``address`` who does not belong to the job, as
    ``text`` says.
    """

    rank: int
    text: str
    address: str


@dataclass(frozen=True)
class StateHash(OfWorker, running=True):
    """A hash of a worker's state after ``step``, which the coordinator has asked for."""

    step: int
    digest: str


@dataclass(frozen=True)
class SurvivorReport(OfWorker, running=True, most=1 << 22):
    """A worker has stopped for ``generation``, and says what it has.

    It has applied ``stepped`` steps, made the plan ``digest``, by which a step takes ``period_us``, while no plan's
    takes less than ``bound_us``, and still holds ``held`` (core.vocabulary.packed_data.pack), and of plain iterators'
    data ``held_draws`` (core.vocabulary.iterator_draws.pack).  ``timings``: seconds that it took to notice and to plan.
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
class OutOfData(OfWorker, running=True, ahead=2):
    """A worker has found nothing to draw for ``step``, since its plain iterator has ended, or all have."""

    generation: int
    step: int


@dataclass(frozen=True)
class CheckpointLoaded(OfWorker, running=True):
    """A worker has the state of a checkpoint that all were to load."""

    generation: int


@dataclass(frozen=True)
class Resized(OfWorker, running=True):
    """A worker plans for another number of micro-batches from the next step on, as all do that have passed the barrier
    before.

    ``batch``: samples in a step of all replicas; ``full_us``: the planned period in microseconds with everybody there.
    """

    generation: int
    micro_batches: int
    batch: int
    full_us: int


@dataclass(frozen=True)
class Stepped(OfWorker, running=True, ahead=1):
    """A worker has applied ``step``.  ``place``: where its plain iterator stood when all was drawn for that, None where
    it does not stand at its replica's place, or there is none.
    """

    generation: int
    step: int
    place: Place | None = None


@dataclass(frozen=True)
class Fingerprint(OfWorker, running=True):
    """A hash of a worker's state after ``step``; said before :class:`Stepped`.

    ``tied``: of each weight that other stages have too, by name.
    """

    step: int
    digest: str
    tied: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ComputeTime(OfWorker, running=True):
    """A worker has computed for ``spent_us`` microseconds in ``step``, and ``nominal_us`` is what that should take;
    said before :class:`Stepped`.

    ``again_us``: the part of the first that went to what had been another worker's, or to what it had computed before.
    ``exchange_us``: how long its sum with the other replicas took, most of which who comes early waits for the others;
    ``own_us``: the part of the time since the step before in which it has waited for nobody.  Neither is known of a
    step that a failure has interrupted, and the second not of the first.
    """

    step: int
    spent_us: int
    nominal_us: int
    again_us: int = 0
    exchange_us: int | None = None
    own_us: int | None = None


AHEAD_OF_STEPPED = (ComputeTime,)
"""What is said right before :class:`Stepped`, so that one packet can have both."""


@dataclass(frozen=True)
class Contribution(OfWorker, running=True, ahead=2):
    """A worker's part of named numbers of one step that everybody needs (losses by micro-batch, squared norms by
    stage).

    They are complete when ``expected`` keys are there, of each ``shard``.
    """

    step: int
    name: str
    values: dict[str, Loss]
    expected: int
    shard: int = 0


@dataclass(frozen=True)
class BarrierReached(OfWorker, running=True, most=1 << 22):
    """A worker has reached the barrier named ``place``, outside a step (core/coordinator/facts/barriers.py), with
    ``values`` for everybody.
    """

    generation: int
    place: str
    values: dict[str, Any]


@dataclass(frozen=True)
class Leaving(OfWorker):
    """A worker wants to go at a commit line: a planned leave, no failure.  ``all``: the job is to end there."""

    reason: str
    all: bool = False


@dataclass(frozen=True)
class HostGoes(OfWorker, running=True):
    """The host of a worker is to be taken away, for ``reason``: all workers there are to go at a commit line.
    ``coordinator``: it is the coordinator's host, so the job is to end there.
    """

    reason: str
    coordinator: bool = False


@dataclass(frozen=True)
class Post(OfWorker, most=1 << 24):
    """A worker posts ``value`` on the board named ``board``, in membership ``generation``; ALWAYS: for newcomers of its
    rank (core/coordinator/facts/boards.py).
    """

    generation: int
    board: str
    value: bytes


@dataclass(frozen=True)
class ReadBoard(OfWorker):
    """A worker asks, in ``generation``, for what each of ``ranks`` posts on the board ``board``."""

    generation: int
    board: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class WantResult(OfWorker):
    """A worker asks the one of rank ``holder`` to post the result of collective ``number`` of the sequence ``line``;
    the coordinator passes it on.
    """

    generation: int
    holder: int
    line: str
    number: int


@dataclass(frozen=True)
class Through(OfWorker, running=True):
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
class Vanishing(OfWorker, running=True, ahead=0):
    """A worker's script calls ``os._exit(0)`` after ``step``, which is committed, and before the next one."""

    step: int


@dataclass(frozen=True)
class Exited(OfWorker, by=SUPERVISOR):
    """A supervisor saw its worker's process end.  ``code`` is negative for a signal; ``at`` is the time in seconds."""

    code: int
    at: float


@dataclass(frozen=True)
class Unguarded(OfWorker, by=SUPERVISOR):
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
class Missing(OfWorker, running=True):
    """A worker has waited long for ``what`` from seat ``source``, and both are there: the connection between them is
    broken.

    ``source`` is empty where ``what`` is a collective, which does not say whose connection it is.
    """

    generation: int
    what: str
    source: str


@dataclass(frozen=True)
class SupervisorHeartbeat(OfWorker, by=SUPERVISOR):
    """A supervisor's heartbeat, every so often: its worker's process is there, whether it is stopped, and how many
    seconds it has used a CPU, or waited for one or for a disk, None where that can't be read.
    """

    stopped: bool
    cpu_s: float | None = None


@dataclass(frozen=True)
class Terminate(ToCoordinator, by=SUPERVISOR):
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


NOTED: dict[str, dict[str, type]] = {
    **{kind: {} for kind in ("behind", "catching_up", "checkpoint", "data", "fused", "helpers", "log", "log_budget")},
    **{kind: {} for kind in ("log_boundaries", "loss_scale", "memory", "moved", "peak", "recovery_plan", "restored")},
    **{kind: {} for kind in ("served", "stage", "stranger", "warning", "zero")},
    "fault": {"fault": str, "seat": str, "struck_at": float},
    "unwritten": {"path": str},
    "written": {"path": str},
}
"""The kinds of events that workers note, and of each the details that are read by more than people."""


@dataclass(frozen=True)
class Note(OfWorker):
    """A worker has something to be said and logged: see :class:`core.coordinator.facts.output.Event`."""

    kind: str
    text: str
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def is_known(self) -> bool:
        """Whether workers note events of this kind, with these details; all others are the coordinator's own."""
        wanted = NOTED.get(self.kind)
        return wanted is not None and all(type(self.details.get(name)) is kind for name, kind in wanted.items())
