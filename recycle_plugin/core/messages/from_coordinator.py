"""Messages from the coordinator to workers, supervisors and operators."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

from recycle_plugin.core.messages.from_workers import LogFolder
from recycle_plugin.core.messages.said import OfWorker
from recycle_plugin.core.messages.typed import Finite, Unreadable
from recycle_plugin.core.vocabulary.barrier import Barrier
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.iterator_draws import Place
from recycle_plugin.core.vocabulary.losses import Loss
from recycle_plugin.core.vocabulary.roster import Member, Roster, WorkerId
from recycle_plugin.core.vocabulary.step_batches import StepBatches

# exit code of a job that was ended from outside: sysexits' "temporary failure, try again"
TRY_AGAIN = 75


@dataclass(frozen=True)
class RunFolder:
    """Answers an operator's Hello: the absolute ``path`` of the run folder, empty before the job's start."""

    path: str


@dataclass(frozen=True)
class Answer:
    """Answers an operator's request. ``text``: a sentence on what is done, or why not; ``done``: whether it is."""

    text: str
    done: bool


@dataclass(frozen=True)
class Welcome:
    """Answers a Hello. ``job_id``: the job's name;
    ``incarnation``: to a worker, which process of its rank it is; ``ranks``: how many the job has; ``line``: the
    connection's number; ``heard``: how many messages the coordinator has received over it; ``token``: the sender of the
    Hello needs it to continue the connection.
    """

    job_id: str
    incarnation: int = 0
    ranks: int = 0
    line: int = -1
    heard: int = 0
    token: str = ""


@dataclass(frozen=True)
class Placed:
    """Answers a supervisor whose Hello was ``placing``: the rank of its worker."""

    rank: int


@dataclass(frozen=True)
class Seated:
    """Tells a supervisor whose Hello was ``joining`` that it is now the supervisor of ``rank``."""

    rank: int


@dataclass(frozen=True)
class Refused:
    """Tells a supervisor whose Hello was ``joining``, or a standby, that it is not needed: why, and its exit code."""

    reason: str
    code: int = 1


@dataclass(frozen=True)
class Restart(OfWorker):
    """Tells the supervisor of ``rank``, whose last process has ended, to start the next after ``after_s`` seconds."""

    after_s: Finite


@dataclass(frozen=True)
class Stay(OfWorker):
    """Tells the supervisor of ``rank`` to stay when the process ``incarnation`` has ended, mostly by a planned leave:
    another process may follow. None is announced yet, so the supervisor may also be ended.
    """


@dataclass(frozen=True)
class ForkStandby:
    """Tells the supervisor of ``rank`` to have its guard start a standby."""

    rank: int


@dataclass(frozen=True)
class Pace:
    """Tells supervisors to send a heartbeat every ``every_s`` seconds, and to wait ``silent_s`` seconds for a silent
    coordinator's host if it has no standby elsewhere.
    """

    every_s: Finite
    silent_s: float


@dataclass(frozen=True)
class Generation:
    """Announces a version of the membership to all its members. ``number``: counts up; ``from_step``: 0 if it holds at
    once and members stop what they do, else the first step that it holds for; ``cause``: in words; ``at``: when it was
    made, in seconds since the epoch; ``slowness``: measured seats and percent, as in core.vocabulary.cost.CostModel.
    """

    PACKS: ClassVar[bool] = True

    number: int
    members: tuple[Member, ...]
    from_step: int
    cause: str
    at: Finite
    slowness: tuple[tuple[Seat, int], ...] = ()

    @cached_property
    def roster(self) -> Roster:
        return Roster(self.members)

    def changed(self, before: Generation) -> GenerationChange:
        """Return this generation for those that have heard of ``before``, in two passes over the members."""
        gone = tuple(member.worker for member in self.roster.leaves(before.roster))
        come = self.roster.joins(before.roster)
        return GenerationChange(
            self.number, before.number, gone, come, self.from_step, self.cause, self.at, self.slowness
        )


@dataclass(frozen=True)
class GenerationChange:
    """A :class:`Generation`, for a connection whose other end has received generation ``since`` last: the members
    ``come`` have taken the places of the workers ``gone``. Both ends of a connection know its past messages
    (core/messages/line_end.py), so no other code sees this class.
    """

    PACKS: ClassVar[bool] = True

    number: int
    since: int
    gone: tuple[WorkerId, ...]
    come: tuple[Member, ...]
    from_step: int
    cause: str
    at: Finite
    slowness: tuple[tuple[Seat, int], ...] = ()

    def behind(self, before: Generation | None) -> Generation | Unreadable:
        """Return the whole generation, ``before`` being the last heard."""
        if before is None or before.number != self.since:
            last = "none" if before is None else before.number
            return Unreadable("a change", f"is of generation {self.since}, and the last that was heard is {last}")
        gone = set(self.gone)
        stay = [member for member in before.members if member.worker not in gone]
        members = tuple(sorted((*stay, *self.come), key=lambda member: member.worker))
        return Generation(self.number, members, self.from_step, self.cause, self.at, self.slowness)


class Run(NamedTuple):
    """``length`` numbers, each larger by ``by`` than the one before."""

    by: int
    length: int


@dataclass(frozen=True)
class FirstGeneration:
    """A :class:`Generation`, over a connection whose other end has heard of none (core/messages/generation_forms.py):
    the frame of :class:`Everyone`, and those of :class:`WhereNear`.
    """

    number: int
    from_step: int
    cause: str
    at: Finite
    slowness: tuple[tuple[Seat, int], ...]
    everyone: bytes
    near: tuple[bytes, ...]


@dataclass(frozen=True)
class Everyone:
    """Part of a FirstGeneration: all members but their addresses, sorted by rank. ``hosts``: the number of each one's
    host.
    """

    PACKS: ClassVar[bool] = True

    ranks: tuple[Run, ...]
    replicas: tuple[Run, ...]
    stages: tuple[Run, ...]
    hosts: tuple[Run, ...]
    incarnations: tuple[Run, ...]
    shards: tuple[Run, ...]


@dataclass(frozen=True)
class WhereNear:
    """Part of a FirstGeneration: the ``addresses`` of the members with these ``ranks``."""

    PACKS: ClassVar[bool] = True

    ranks: tuple[Run, ...]
    addresses: tuple[str, ...]


@dataclass(frozen=True)
class Resume:
    """Tells all members of ``generation``, once all have reported, to go on after step ``committed``.

    ``held``, ``held_draws``: what each seat holds of later steps: the first shortened by
    core.vocabulary.packed_data.among_all, the second by the seat's text form, as reported. ``norm``: the norm for
    which the next step was rejected (core/coordinator/facts/step_validation.py), else None; ``rejected``: not every
    worker knew that, so what was computed after the step does not count. ``placed``: seats whose plain iterators stand
    at their replicas' places; ``places``: those places by replica, as far as known; ``ended``: by replica, the number
    of its script's iterator that has ended. ``unfilled``: the step that is dropped because all iterators have ended; 0
    for none. ``batches``: whose micro-batches each step has, and which step is void; None if steps have all of them.
    """

    PACKS: ClassVar[bool] = True
    MOST: ClassVar[int] = 1 << 28

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
    """Answers a worker's Heartbeat ``number``: silence does not count for ``for_s`` seconds from its sending. To a
    supervisor: the coordinator has received its :class:`Exited` of the process of incarnation ``number``.
    """

    number: int
    for_s: float


@dataclass(frozen=True)
class Fence(OfWorker):
    """Says that the worker of ``rank`` and ``incarnation`` was given up, and why. Its supervisor kills it; the worker
    itself, if it gets this, ends without doing anything more.
    """

    reason: str


@dataclass(frozen=True)
class Serve:
    """Tells a worker to serve its state to ``newcomer``, which has asked ``number`` times by now. The line replaces any
    earlier one.
    """

    newcomer: WorkerId
    number: int = 1


@dataclass(frozen=True)
class HashAfter:
    """Asks a newcomer, and the workers of its stage, for a StateHash of the state after ``step``."""

    step: int


@dataclass(frozen=True)
class ServeLogs:
    """Tells the supervisor of ``rank`` to serve the log segments in ``folder``, also after its worker has died."""

    rank: int
    folder: LogFolder


@dataclass(frozen=True)
class LogsAt:
    """Part of a Replay: logs of ``ranks`` are in the folder with this ``token``, served at each of ``addresses``."""

    token: str
    addresses: tuple[str, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Replay:
    """Tells a newcomer of an empty stage, or a companion (core/worker/companion.py), to take the state after ``step``
    from the checkpoint in the folder ``path``, and to replay its stage from the logs up to step ``committed``.

    ``stages``: all stages that are being replayed; their logs grow meanwhile. ``valid_from``: the generation from which
    data is valid. ``passed``: the barriers passed since ``committed``; at others the members may be waiting for this
    worker too. ``helpers``: live members that may help. ``logs``: where the needed logs are served.
    """

    step: int
    path: str
    committed: int
    stages: tuple[int, ...]
    valid_from: int = 0
    passed: tuple[Barrier, ...] = ()
    helpers: tuple[Member, ...] = ()
    logs: tuple[LogsAt, ...] = ()


@dataclass(frozen=True)
class Beside:
    """Tells a newcomer that replays its stage which other newcomers of the stage wait for it, and may help.
    ``members``: all of them; sent again for each change.
    """

    members: tuple[Member, ...]


@dataclass(frozen=True)
class Expected:
    """Tells workers that wait for an empty stage ``what`` comes next, in words, and to wait at least ``limit_s`` s."""

    what: str
    limit_s: float


@dataclass(frozen=True)
class LogOnly:
    """Tells all workers, and each newcomer, to log from now on the boundary tensors of these ``boundaries`` only
    (core/vocabulary/log_boundaries.py). A worker that was not told logs all.
    """

    boundaries: tuple[int, ...]


@dataclass(frozen=True)
class Committed:
    """Tells all workers that every live worker has applied ``step``: its effects stay. ``figures``: those of
    core.coordinator.facts.step_figures, for the user's monitors.
    """

    step: int
    figures: dict[str, float] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Collected:
    """Tells all workers a complete set of contributions, the only one of its ``step`` and ``name`` unless it is
    discarded; a worker that joins is told it too. ``values``: as in Contribution; of losses the mean alone
    (core/messages/contributions.py).
    """

    step: int
    name: str
    values: dict[str, Loss]


@dataclass(frozen=True)
class Recorded:
    """Tells a newcomer's script, which runs from the top, what is over, before its first step and as steps are
    committed.

    ``step``, ``losses``: the mean losses of the steps from ``step`` on. ``evaluation``, ``evaluations``: the mean
    losses of the evaluations from number ``evaluation`` on. ``committed``: the last step that is over. ``unknown``:
    steps whose loss nobody knows. ``refused``: why such a script can't come to the present, else empty. ``place``:
    where the replica's plain iterator stood after ``committed``, if known. ``unfilled``: the steps before which all
    data had ended, one for each time.
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
    """Tells all workers that all have arrived at ``barrier``. ``values``: what they have brought.
    ``from_step``: no worker has started this step, nor will before it reads this.
    """

    barrier: Barrier
    values: dict[str, Any]
    from_step: int


@dataclass(frozen=True)
class Posted:
    """Answers a ReadBoard: ``values`` on the ``board``, by rank. Each later value comes in a Posted of its own."""

    board: str
    values: dict[str, bytes]


@dataclass(frozen=True)
class StoreAnswer:
    """Answers the worker's StoreCall of this ``number`` with its ``values``, or says ``why_not``."""

    number: int
    values: tuple[bytes, ...]
    why_not: str = ""


@dataclass(frozen=True)
class End:
    """Tells workers that the job ends before ``step`` (0: at once). ``reason``: in words; ``failed``: the job could not
    go on; ``code``: the exit code for the launcher; TRY_AGAIN asks for a checkpoint first.
    """

    step: int
    reason: str
    failed: bool
    code: int = 0


@dataclass(frozen=True)
class MayGo:
    """Answers a worker's Through: all have committed ``step``, the last one, and no worker needs it any more."""

    step: int


@dataclass(frozen=True)
class Over:
    """Tells supervisors that the job is over: each ends with ``code`` once its worker is gone."""

    code: int
