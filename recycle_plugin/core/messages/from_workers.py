"""Messages from workers and their supervisors to the coordinator."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from recycle_plugin.core.messages.activity import Activity
from recycle_plugin.core.messages.job_spec import JobSpec
from recycle_plugin.core.messages.said import LONGEST, SUPERVISOR, OfWorker, ToCoordinator
from recycle_plugin.core.messages.typed import Finite
from recycle_plugin.core.vocabulary.barrier import Barrier
from recycle_plugin.core.vocabulary.compute_time import ComputeTime
from recycle_plugin.core.vocabulary.iterator_draws import Place
from recycle_plugin.core.vocabulary.losses import Loss
from recycle_plugin.core.vocabulary.roster import Member, WorkerId

ALWAYS = -1  # the generation of posts that last as long as the job


@dataclass(frozen=True)
class Hello:
    """The first message of every connection, from the end that connects.

    ``role``: ``worker``; ``supervisor``; ``placing``, a supervisor that has no rank yet; ``joining``, a supervisor that
    asks for a lost worker's rank, and waits for one if it ``waits``; ``operator``, a terminal, without rank; or
    ``standby``. ``pid``, ``host``: of the sender. ``incarnation``: which process of its rank a worker is. ``line``: the
    connection that it continues, -1 for a new one; ``heard``: the messages received over that; ``token``: the
    Welcome's. ``term``: the last term that the sender knows of (core/coordinator/succession.py). ``port``: where a
    standby on another host listens; 0 on the coordinator's host. ``silent``: the sender has turned to a standby since
    nothing at all came from the coordinator's host.
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
    silent: bool = False


@dataclass(frozen=True)
class LogFolder:
    """The folder of a worker's log: its ``path`` on the worker's host, the ``token`` that is equal for all that see the
    same folder, and the address of the ``host`` at which others reach it.
    """

    path: str
    token: str
    host: str


@dataclass(frozen=True)
class Ready(ToCoordinator):
    """From a worker whose engine is built: it asks to take part. ``member``: its identity, seat and addresses;
    ``stepped``: steps applied in its state; ``job``: the job by its settings; ``logged_in``: its log's folder, if any.
    """

    member: Member
    stepped: int
    job: JobSpec
    logged_in: LogFolder | None = None

    @property
    def worker(self) -> WorkerId:
        return self.member.worker


@dataclass(frozen=True)
class CatchUp(OfWorker):
    """From a newcomer whose script has come to the present: it asks for the state of its stage. ``number``: how often
    it has asked by now.
    """

    number: int = 1


@dataclass(frozen=True)
class Serving(OfWorker):
    """From a worker, answering Serve: it serves ``newcomer`` at ``address``. Forwarded to the newcomer. ``number``: of
    the newcomer's request; it has no use for the answer to an earlier one than its last, whose line may be closed.
    """

    newcomer: WorkerId
    address: str
    number: int = 1


@dataclass(frozen=True)
class CaughtUp(OfWorker):
    """From a newcomer that has the state after ``step`` and follows the others' steps, or has replayed its stage: it
    asks to take part. ``bytes``: bytes of state received; ``followed``: bytes of sums received since; ``helpers``: how
    many workers have helped its replay to the end; ``sources``: the workers whose sums it follows.
    """

    step: int
    bytes: int
    followed: int
    helpers: int = 0
    sources: tuple[WorkerId, ...] = ()


@dataclass(frozen=True)
class Replaying(OfWorker):
    """From a worker that has replayed ``step`` from the logs. The coordinator forwards it to the workers that wait."""

    step: int


@dataclass(frozen=True)
class Accompanied(OfWorker):
    """From a companion that has replayed its stage up to ``step`` and has its own state again."""

    step: int


@dataclass(frozen=True)
class Unreplayable(OfWorker):
    """From a worker that can't replay its stage, with the reason. ``lacks``: the stage that could make again what is
    missing; ``checkpoint``: the path of an unreadable one.
    """

    why: str
    lacks: int | None = None
    checkpoint: str = ""


@dataclass(frozen=True)
class Durable(OfWorker, running=True):
    """From the worker that publishes it: the checkpoint of ``step`` in folder ``path`` is on disk and was read back.

    The coordinator forwards it to all: what is logged up to ``step`` may go. ``valid_from``: the generation from which
    data is valid at the sender; ``write_s``: seconds for which the slowest worker wrote its share, 0 if unknown;
    ``boundaries``: those to log from now on, None for no change.
    """

    step: int
    path: str
    valid_from: int = 0
    write_s: Finite = 0.0
    boundaries: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Logged(OfWorker):
    """From a worker: all that it made of the steps up to ``step`` is in its log, on its disk."""

    step: int


@dataclass(frozen=True)
class LogBroken(OfWorker):
    """From a worker whose log lacks something of ``step``, with the reason: no stage can be replayed over that step, so
    none before the next checkpoint is durable.
    """

    step: int
    why: str


@dataclass(frozen=True)
class LogsServed(ToCoordinator, by=SUPERVISOR):
    """From the supervisor of ``rank``: it serves the folder with this ``token`` at ``address``."""

    rank: int
    token: str
    address: str


@dataclass(frozen=True)
class StrangersAtLogs(ToCoordinator, by=SUPERVISOR):
    """From the supervisor of ``rank``: ``text`` describes a caller from ``address`` that is not of the job."""

    rank: int
    text: str
    address: str


@dataclass(frozen=True)
class StateHash(OfWorker, running=True):
    """From a worker asked by HashAfter: the hash of its state after ``step``."""

    step: int
    digest: str


@dataclass(frozen=True)
class SurvivorReport(OfWorker, running=True, most=1 << 22):
    """From a worker that has stopped for ``generation``: what it has.

    ``stepped``: steps applied. ``digest``: the hash of its plan; ``period_us``: the plan's time per step in
    microseconds; ``bound_us``: the lower bound of any plan's. ``held``: data that it holds
    (core.vocabulary.packed_data.pack); ``held_draws``: batches of plain iterators that it holds
    (core.vocabulary.iterator_draws.pack). ``timings``: seconds that it took to notice and to plan. ``loaded``: its
    state is that of a checkpoint that all have loaded. ``valid_from``: the generation from which its data is valid
    (core/worker/step_store.py). ``places``: by step, where its plain iterator stood after the last applied step, and
    after the next if that was begun; empty if it has none, or not at its replica's place. ``ended``: the number of its
    iterator if that has ended, else 0. ``lacks``: the step for which it found nothing to draw, 0 for none.
    ``adopted``: the newest generation with which it has gone on, 0 for none.
    """

    generation: int
    stepped: int
    digest: str
    held: dict[str, str] = field(default_factory=dict)
    timings: dict[str, Finite] = field(default_factory=dict)
    loaded: bool = False
    period_us: int = 0
    bound_us: int = 0
    held_draws: dict[str, str] = field(default_factory=dict)
    valid_from: int = 0
    places: dict[str, Place] = field(default_factory=dict)
    ended: int = 0
    lacks: int = 0
    adopted: int = 0


@dataclass(frozen=True)
class OutOfData(OfWorker, running=True, ahead=2):
    """From a worker that found nothing to draw for ``step``, because its plain iterator has ended, or all have."""

    generation: int
    step: int


@dataclass(frozen=True)
class Resized(OfWorker, running=True):
    """From a worker that plans for another number of micro-batches from the next step on, like all that have passed the
    barrier before. ``micro_batches``: of a replica; ``batch``: samples in a step of all replicas; ``full_us``: the
    planned period in microseconds with all seats live.
    """

    generation: int
    micro_batches: int
    batch: int
    full_us: int


@dataclass(frozen=True)
class Stepped(OfWorker, running=True, ahead=1):
    """A worker has applied ``step``.  ``place``: where its plain iterator stood when all was drawn for the step; None
    if the worker has no plain iterator, or it does not stand at its replica's place.  ``time``: what the step took;
    None when a step is reported again after a regroup.
    """

    generation: int
    step: int
    place: Place | None = None
    time: ComputeTime | None = None


@dataclass(frozen=True)
class Fingerprint(OfWorker, running=True):
    """From a worker, before :class:`Stepped`: the hash of its state after ``step``. ``tied``: by name, the hash of each
    weight that other stages have too.
    """

    step: int
    digest: str
    tied: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Contribution(OfWorker, running=True, ahead=2):
    """From a worker: its part of the numbers ``name`` of ``step`` that all workers need (losses by micro-batch, squared
    norms by stage). They are complete when ``expected`` keys are there of each ``shard``.
    """

    step: int
    name: str
    values: dict[str, Loss]
    expected: int
    shard: int = 0


@dataclass(frozen=True)
class BarrierReached(OfWorker, running=True, most=1 << 22):
    """From a worker at ``barrier``, outside a step, with ``values`` for all."""

    generation: int
    barrier: Barrier
    values: dict[str, Any]


@dataclass(frozen=True)
class Leaving(OfWorker):
    """From a worker that wants to leave at a commit, as planned. ``all``: the job is to end there."""

    reason: str
    all: bool = False


@dataclass(frozen=True)
class HostGoes(OfWorker, running=True):
    """From a worker whose host is to be taken away, with the reason: all workers there leave at a commit.
    ``coordinator``: it is the coordinator's host, so the job ends there.
    """

    reason: str
    coordinator: bool = False


@dataclass(frozen=True)
class Post(OfWorker, most=LONGEST):
    """From a worker: it posts ``value`` on ``board`` in membership ``generation``; ALWAYS: for newcomers of its rank
    (core/coordinator/facts/boards.py).
    """

    generation: int
    board: str
    value: bytes


@dataclass(frozen=True)
class ReadBoard(OfWorker):
    """From a worker: it asks, in ``generation``, for what each of ``ranks`` posts on ``board``. Answered by Posted."""

    generation: int
    board: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class StoreCall(OfWorker, most=LONGEST):
    """From a worker: it calls a method of the script's store (core/coordinator/facts/key_values.py). Answered by
    StoreAnswer with the same ``number``.
    """

    number: int
    call: str
    keys: tuple[str, ...]
    values: tuple[bytes, ...]


@dataclass(frozen=True)
class WantResult(OfWorker):
    """From a worker: the worker of rank ``holder`` is to post the result of collective ``number`` of the sequence
    ``line``. The coordinator forwards it.
    """

    generation: int
    holder: int
    line: str
    number: int


@dataclass(frozen=True)
class Through(OfWorker, running=True):
    """From a worker whose script is through, in a job that logs: it leaves once it gets MayGo."""


@dataclass(frozen=True)
class Left(OfWorker):
    """From a worker that leaves now, after all have committed, with exit code ``code``. ``planned``: the step has come
    before which it was to leave; else its script is through, after ``step``.
    """

    code: int = 0
    planned: bool = False
    step: int = 0


@dataclass(frozen=True)
class Vanishing(OfWorker, running=True, ahead=0):
    """From a worker whose script calls ``os._exit(0)`` after ``step``, which is committed, and before the next step."""

    step: int


@dataclass(frozen=True)
class Exited(OfWorker, by=SUPERVISOR):
    """From a supervisor whose worker's process ended. ``code``: negative for a signal; ``at``: seconds since 1970."""

    code: int
    at: Finite


@dataclass(frozen=True)
class Unguarded(OfWorker, by=SUPERVISOR):
    """From a supervisor whose guard ``pid``, which the launcher started, is gone and takes the worker with it."""

    pid: int


@dataclass(frozen=True)
class Heartbeat(OfWorker):
    """From a worker, at intervals, from a thread of its own: it has finished ``done`` instructions, the last of
    ``step``, and what it is ``doing``. ``number`` comes back in :class:`Lease`.
    """

    number: int
    done: int
    doing: Activity
    step: int = 0


@dataclass(frozen=True)
class Missing(OfWorker, running=True):
    """From a worker that has waited long for ``what`` from the live seat ``source``: the connection between them is
    broken. ``source`` is empty for a collective, which does not tell whose connection it is.
    """

    generation: int
    what: str
    source: str


@dataclass(frozen=True)
class SupervisorHeartbeat(OfWorker, by=SUPERVISOR):
    """From a supervisor, at intervals: its worker's process exists. ``stopped``: whether it is stopped; ``cpu_s``:
    seconds for which it used a CPU, or waited for one or for a disk; None if unreadable. ``dying``: whether it is
    ending and still there: the system frees its memory, or writes its core.
    """

    stopped: bool
    cpu_s: Finite | None = None
    dying: bool = False


@dataclass(frozen=True)
class Terminate(ToCoordinator, by=SUPERVISOR):
    """From a supervisor that is asked to end the job at the next commit. ``host``: where the supervisor of ``rank`` got
    the signal that ``reason`` names; empty for another reason.
    """

    rank: int
    reason: str
    host: str = ""


@dataclass(frozen=True)
class Fatal(OfWorker):
    """From a worker that found something after which nobody can go on."""

    text: str


@dataclass(frozen=True)
class Crashed(OfWorker):
    """From a worker whose script has ended with ``error``, in one line; the process ends with it. ``trace``: the
    traceback, if there is one; ``step``: the last step begun.
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
"""The kinds of events that workers note; for each the details that programs read too."""


@dataclass(frozen=True)
class Note(OfWorker):
    """From a worker: an event to print and log (:class:`core.coordinator.facts.output.Event`)."""

    kind: str
    text: str
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def is_known(self) -> bool:
        """Whether workers note events of this kind, with these details; all others are the coordinator's own."""
        wanted = NOTED.get(self.kind)
        return wanted is not None and all(type(self.details.get(name)) is kind for name, kind in wanted.items())
