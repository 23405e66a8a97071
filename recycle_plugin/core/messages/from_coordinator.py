"""What the coordinator tells workers, supervisors and operators."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from recycle_plugin.core.messages.from_workers import LogFolder
from recycle_plugin.core.messages.of_worker import OfWorker
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.iterator_draws import Place
from recycle_plugin.core.vocabulary.losses import Loss
from recycle_plugin.core.vocabulary.roster import Member, Roster, WorkerId
from recycle_plugin.core.vocabulary.step_batches import StepBatches

# exit code of a job that was ended from outside: sysexits' "temporary
# failure, try again"
TRY_AGAIN = 75


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
    ``ranks`` it has; to a worker also which incarnation of its rank it is.  ``line`` is the connection's number,
    ``heard`` how many messages of its other end the coordinator has, and ``token`` what that end has to know to go on
    with it.
    """

    store_port: int
    job_id: str
    incarnation: int = 0
    ranks: int = 0
    line: int = -1
    heard: int = 0
    token: str = ""


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
class ForkStandby:
    """To the supervisor of ``rank``: have the guard start a process that stands by, to take the coordinator's place."""

    rank: int


@dataclass(frozen=True)
class Pace:
    """To supervisors of a large job: send a heartbeat every so many seconds."""

    every_s: float


@dataclass(frozen=True)
class Generation:
    """A version of the membership.  ``from_step`` 0: it holds at once, leave what you do; otherwise from that step on.

    ``slowness``: seats and percent that were measured, as in core.vocabulary.cost.CostModel.  ``at``: when it was made,
    in seconds.
    """

    PACKS: ClassVar[bool] = True

    number: int
    members: tuple[Member, ...]
    from_step: int
    cause: str
    at: float
    slowness: tuple[tuple[Seat, int], ...] = ()

    @cached_property
    def roster(self) -> Roster:
        return Roster(self.members)


@dataclass(frozen=True)
class Resume:
    """Everybody in ``generation`` has reported: go on behind step ``committed``, with what each seat holds of later
    ones.

    ``held``, ``held_draws``: by the seat's text form, as reported.  ``norm``: where the next step was rejected
    (core/coordinator/facts/step_validation.py), why; ``rejected``: not everybody knew that, so what was computed after
    it counts nowhere.  ``placed``: seats whose plain iterators stand at their replicas' places; ``places``: these, by
    replica, as far as they are known; ``ended``: by replica, which of its script's iterators has ended. ``unfilled``:
    the step that the iterators can't fill, since all have ended, and that is dropped; 0 for none. ``batches``: whose
    micro-batches each step has from now on, and which step is void, where that is not all; None: it is all.
    """

    PACKS: ClassVar[bool] = True  # 0.5 KiB a member, and a twentieth of that once packed
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
    """A worker is to serve ``newcomer``, which catches up."""

    newcomer: WorkerId


@dataclass(frozen=True)
class HashAfter:
    """A worker is to send the hash of its state after ``step``: one of a stage to which somebody comes back, or that
    newcomer.
    """

    step: int


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

    ``figures``: those of core.coordinator.facts.step_figures, for the user's monitors.
    """

    step: int
    figures: dict[str, float] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Collected:
    """A complete set of contributions: the only one of its step and name, unless that is discarded."""

    step: int
    name: str
    values: dict[str, Loss]


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
class Posted:
    """The answer to a ReadBoard: ``values`` on the board, by rank; each later one comes in a message of its own."""

    board: str
    values: dict[str, bytes]


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
