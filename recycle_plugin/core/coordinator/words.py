"""Which messages the coordinator accepts, from which sender and when. Each message's class declares its sender
(core/messages/said.py).

A worker's message may be wrong in three ways:
* *Of the wrong sender*: only another process may send it. It is ignored, although its sender knows the job's secret.
* *Old*: of a past generation, step or barrier, or repeated. Messages overtake each other, so no sender is at fault, and
  the message's handler drops it.
* *Impossible*: it names a generation that was never published, a step that no worker can have begun, or something that
  the job does not have, or it contradicts an earlier message of the same worker. The worker is given up as if it had
  died, since its next message may be as wrong and look right.

A worker is believed in what it alone knows: its losses and hashes, that it has applied the next step, and which workers
it does not hear in the generation in force. Messages that mean the end of the job, or of its host's part in it, are
believed too: Fatal, Terminate, Leaving of all, HostGoes, Left and, in a job that logs, Through.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from recycle_plugin.core.coordinator.facts import boards
from recycle_plugin.core.coordinator.state import JobState
from recycle_plugin.core.messages.contributions import LOSS, NORM, SHARE
from recycle_plugin.core.messages.from_workers import (
    BarrierReached,
    Contribution,
    Durable,
    Hello,
    Post,
    ReadBoard,
    Ready,
    Resized,
    Serving,
    Stepped,
    SurvivorReport,
    Through,
    Unreplayable,
)
from recycle_plugin.core.messages.job_spec import JobSpec
from recycle_plugin.core.messages.said import WORKER, OfWorker, ToCoordinator
from recycle_plugin.core.messages.typed import Unreadable, read
from recycle_plugin.core.vocabulary.barrier import Meets
from recycle_plugin.core.vocabulary.commit_rule import unstarted
from recycle_plugin.core.vocabulary.ids import MicroBatch
from recycle_plugin.core.vocabulary.iterator_draws import unpack as unpack_drawn
from recycle_plugin.core.vocabulary.losses import Loss
from recycle_plugin.core.vocabulary.packed_data import PackedData
from recycle_plugin.core.vocabulary.roster import Member, WorkerId

SHOWN = 80  # characters of a message in a reason


class Speakers:
    """The sender that each message may come from, and the supervisor that starts each worker. ``supervised``: by rank,
    its (host, process).
    """

    def __init__(self, supervised: Mapping[int, tuple[str, int]] | None = None) -> None:
        self._supervised = dict(supervised or {})
        self._starters: dict[WorkerId, tuple[str, int]] = {}

    @property
    def ranks(self) -> set[int]:
        """The ranks whose supervisor has connected."""
        return set(self._supervised)

    def supervises(self, rank: int, place: tuple[str, int]) -> tuple[str, int]:
        """Record a supervisor of ``rank`` at ``place``, its (host, process). Return the place of the rank's first
        supervisor.
        """
        return self._supervised.setdefault(rank, place)

    def supervisor_of(self, rank: int) -> tuple[str, int] | None:
        """Return (host, process) of the present supervisor of ``rank``, or None."""
        return self._supervised.get(rank)

    def seated(self, rank: int, place: tuple[str, int]) -> None:
        """Record that the supervisor at (host, process) ``place`` has ``rank`` now."""
        self._supervised[rank] = place

    def starts(self, worker: WorkerId) -> None:
        """Record that the present supervisor of its rank starts ``worker``. A rank's first process keeps the first
        supervisor that was recorded for it.
        """
        if worker.rank in self._supervised and (worker.incarnation or worker not in self._starters):
            self._starters[worker] = self._supervised[worker.rank]

    def may_say(self, hello: Hello, worker: WorkerId | None, message: object) -> bool:
        """Return whether the sender that came with ``hello``, the process of ``worker`` or a supervisor, may send
        ``message``. A supervisor that has asked for its rank is known by its host and process.
        """
        if not isinstance(message, ToCoordinator) or (message.BY == WORKER) != (worker is not None):
            return False
        its = message.worker if isinstance(message, OfWorker | Ready) else None
        if worker is not None:
            return its == worker
        rank, joined, place = getattr(message, "rank", -1), hello.role == "joining", (hello.host, hello.pid)
        present = self._supervised.get(rank)
        starter = self._starters.get(its, present) if its is not None else present if joined else place
        return (joined or rank == hello.rank) and starter == place


def objection(message: OfWorker, state: JobState) -> str | None:
    """Return why ``message`` is impossible, "" if it is to be ignored (too old or too early), None if it is valid."""
    if not state.attendance.is_heard(message):
        return ""
    kind = type(message)
    if kind not in JUDGED:
        return None
    speaker, job = state.speaker(message.worker), state.job
    if speaker is None or job is None:  # senders that take no part are judged by their handlers
        return None
    if (generation := getattr(message, "generation", -1)) > state.regrouping.generation:
        return f"it names generation {generation}, and the newest is {state.regrouping.generation}"
    if message.AHEAD is not None and (step := getattr(message, "step", 0)) > state.committed + message.AHEAD:
        return f"its {type(message).__name__} is of step {step}, and only step {state.committed} is committed"
    fits = FITS.get(kind)
    why = fits is None or fits(message, speaker, job, state)
    if why is True:
        return None
    return why or f"its message does not fit this job: {str(message)[:SHOWN]}"


def _has_room(message: Post | ReadBoard, speaker: Member, job: JobSpec, state: JobState) -> bool | str:
    if state.boards.has_room(message):
        return True
    return f"more than {boards.SHARE >> 20} MiB would be kept for it, on board {message.board[:SHOWN]!r}"


def _is_of_step(message: Contribution, speaker: Member, job: JobSpec, state: JobState) -> bool:
    """Return whether ``speaker`` can have these numbers, and all of them. For a committed step any numbers pass."""
    if message.step <= state.committed:
        return True
    shape = state.attendance.shape
    names, counts = frozenset({str(speaker.seat.chunk)}), range(shape.stages, shape.stages + 1)
    if message.name == LOSS:
        whole = len(shape.batch)
        names, least = shape.batch_names, shape.micro_batches if state.shrinks else whole
        counts = range(least, whole + 1, least)
    elif not all(isinstance(value, float | int) for value in message.values.values()):
        return False
    known = message.name in (LOSS, NORM, SHARE) and message.values.keys() <= names
    return known and message.expected in counts and message.shard == speaker.shard


def _serves(message: Serving, speaker: Member, job: JobSpec, state: JobState) -> bool:
    newcomer = state.joining.get(message.newcomer)
    return newcomer is None or (newcomer.stage, newcomer.member.shard) == (speaker.seat.stage, speaker.shard)


def _brings_its_own(message: BarrierReached, *_: object) -> bool:
    """Return whether the barrier at an evaluation's end gets losses by micro-batch, and any other barrier only the
    sending rank's value. Where all are RESIZED, each says so in a Resized.
    """
    if message.barrier.meets is not Meets.EVALUATED:
        return message.values.keys() <= {str(message.rank)} and message.barrier.meets is not Meets.RESIZED
    try:
        names = {str(MicroBatch.parse(name)) for name in message.values}
    except ValueError:
        return False
    losses = read(dict[str, Loss], message.values, "values")
    return names == message.values.keys() and not isinstance(losses, Unreadable)


FITS: dict[type, Callable[[Any, Member, JobSpec, JobState], bool | str]] = {
    Contribution: _is_of_step,
    BarrierReached: _brings_its_own,
    SurvivorReport: lambda message, speaker, job, state: (
        message.generation != state.regrouping.generation or _of_report(message, state) or True
    ),
    Post: _has_room,
    ReadBoard: _has_room,
    Serving: _serves,
    Stepped: lambda message, *_: (
        (time := message.time) is None or min(time.spent_us, time.nominal_us, time.again_us) >= 0
    ),
    Resized: lambda message, *_: message.micro_batches >= 1,
    Through: lambda message, speaker, job, state: job.log,
    Durable: lambda message, speaker, job, state: all(0 <= each < job.stages - 1 for each in message.boundaries or ()),
    Unreplayable: lambda message, speaker, job, state: message.lacks is None or 0 <= message.lacks < job.stages,
}
"""By class of message: returns whether the job can have what the message names, or why not."""
JUDGED = FITS.keys() | {
    each for each in OfWorker.__subclasses__() if each.AHEAD is not None or "generation" in each.__annotations__
}
"""The classes of messages that can be impossible."""


def _of_report(message: SurvivorReport, state: JobState) -> str | None:
    """Return the mistake in a report for the newest generation, or None."""
    committed = state.committed
    try:
        held, drawn = PackedData(message.held), unpack_drawn(message.held_draws)
        held.check()
        steps = [*drawn, *map(int, message.places), *(each.step for each in held.ranges)]
    except ValueError as error:
        return f"its report of what it holds can't be read: {error}"
    if message.loaded:
        return None
    if not committed <= message.stepped <= committed + 1:  # a newcomer has followed to there, too
        return f"it has applied {message.stepped} steps, and {committed} are committed"
    stages = range(state.attendance.shape.stages)
    if max(steps, default=0) >= unstarted(committed) or not all(each.stage in stages for each in held.ranges):
        return f"it reports data that no worker can have yet: {str(message)[:SHOWN]}"
    before = state.regrouping.report(message.worker)
    if before is not None and _says(before) != _says(message):
        return f"its two reports for generation {message.generation} differ"
    return None


def _says(report: SurvivorReport) -> tuple[Any, ...]:
    """Return the parts of a report that count."""
    return report.stepped, report.digest, report.held, report.held_draws, report.loaded, report.valid_from
