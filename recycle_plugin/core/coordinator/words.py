"""What may be said to the coordinator, by whom and when: as the class of each message declares it
(core/messages/said.py), and no more than the job has.

A word of a worker may be wrong in three ways:

* It is *another's to say*.  It changes nothing, though who says it knows the job's secret.
* It is *old*: of a generation, a step or a barrier that is over, or said once more.  News overtake each other, so that
  is nobody's fault, and it is dropped where it would be taken in.
* It *can't be*: it names a generation that was never published, a step that nobody can have begun, what the job does
  not have, or the contrary of what the same worker has said before.  The worker is given up as if it had died, since
  its next word may be as wrong and look right.

A worker's word on what it alone knows is believed: its losses and hashes, that it has applied the step that is next,
whom it does not hear in the generation in force; and the words whose meaning is the end of the job, or of its host's
part in it, are what they say (Fatal, Terminate, Leaving of all, HostGoes, Left and, in a job that logs, Through).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from recycle_plugin.core.coordinator.facts import boards
from recycle_plugin.core.coordinator.state import JobState
from recycle_plugin.core.messages.contributions import LOSS, NORM, SHARE
from recycle_plugin.core.messages.from_workers import (
    ComputeTime,
    Contribution,
    Durable,
    Hello,
    Post,
    ReadBoard,
    Ready,
    Resized,
    Serving,
    SurvivorReport,
    Through,
    Unreplayable,
)
from recycle_plugin.core.messages.job_spec import JobSpec
from recycle_plugin.core.messages.of_worker import OfWorker
from recycle_plugin.core.messages.said import WORKER, ToCoordinator
from recycle_plugin.core.vocabulary.commit_rule import unstarted
from recycle_plugin.core.vocabulary.iterator_draws import unpack as unpack_drawn
from recycle_plugin.core.vocabulary.packed_data import PackedData
from recycle_plugin.core.vocabulary.roster import Member, WorkerId

SHOWN = 80  # characters of a message


class Speakers:
    """Who may say what; which supervisor starts which worker is learnt as the coordinator has it so.

    ``supervised``: by rank, host and process of the supervisor that its worker is started by, as far as they are known.
    """

    def __init__(self, supervised: Mapping[int, tuple[str, int]] | None = None) -> None:
        self._supervised = dict(supervised or {})
        self._starters: dict[WorkerId, tuple[str, int]] = {}

    @property
    def ranks(self) -> set[int]:
        """The ranks of which a supervisor has come."""
        return set(self._supervised)

    def supervises(self, rank: int, place: tuple[str, int]) -> tuple[str, int]:
        """Note that a supervisor of ``rank`` has come, of that host and process; returns those of the first one."""
        return self._supervised.setdefault(rank, place)

    def supervisor_of(self, rank: int) -> tuple[str, int] | None:
        """Host and process of the supervisor that the worker of ``rank`` is started by."""
        return self._supervised.get(rank)

    def seated(self, rank: int, place: tuple[str, int]) -> None:
        """Note that the supervisor of that host and process has ``rank`` now."""
        self._supervised[rank] = place

    def starts(self, worker: WorkerId) -> None:
        """Note that the supervisor that its rank has now starts ``worker``; that of the first one stays."""
        if worker.rank in self._supervised and (worker.incarnation or worker not in self._starters):
            self._starters[worker] = self._supervised[worker.rank]

    def may_say(self, hello: Hello, worker: WorkerId | None, message: object) -> bool:
        """Whether who has come with ``hello``, the process of ``worker`` or a supervisor, may say ``message``.  A
        supervisor that has asked for its rank is known by its host and process.
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
    """Why ``message`` is not to be taken in: None if it is to be; empty if it counts no more, or not yet; else the
    reason, in words, why nobody in its right mind can have said it by now.
    """
    if not state.attendance.is_heard(message):
        return ""
    speaker, job = state.speaker(message.worker), state.job
    if speaker is None or job is None:  # who takes no part is judged where it comes in
        return None
    if (generation := getattr(message, "generation", -1)) > state.regrouping.generation:
        return f"it speaks of generation {generation}, and the newest is {state.regrouping.generation}"
    if message.AHEAD is not None and (step := getattr(message, "step", 0)) > state.committed + message.AHEAD:
        return f"its {type(message).__name__} is of step {step}, and only step {state.committed} is committed"
    fits = FITS.get(type(message))
    why = fits is None or fits(message, speaker, job, state)
    if why is True:
        return None
    return why or f"this job has nothing of the kind: {str(message)[:SHOWN]}"


def _has_room(message: Post | ReadBoard, speaker: Member, job: JobSpec, state: JobState) -> bool | str:
    if state.boards.has_room(message):
        return True
    return f"it would have more than {boards.SHARE >> 20} MiB kept, on board {message.board[:SHOWN]!r}"


def _is_of_step(message: Contribution, speaker: Member, job: JobSpec, state: JobState) -> bool:
    """Whether ``speaker`` can have these numbers of a step, and they are of as many as there are.  What is of a
    committed step changes nothing.
    """
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


FITS: dict[type, Callable[[Any, Member, JobSpec, JobState], bool | str]] = {
    Contribution: _is_of_step,
    SurvivorReport: lambda message, speaker, job, state: (
        message.generation != state.regrouping.generation or _of_report(message, state) or True
    ),
    Post: _has_room,
    ReadBoard: _has_room,
    Serving: _serves,
    ComputeTime: lambda message, *_: min(message.spent_us, message.nominal_us, message.again_us) >= 0,
    Resized: lambda message, *_: message.micro_batches >= 1,
    Through: lambda message, speaker, job, state: job.log,
    Durable: lambda message, speaker, job, state: all(0 <= each < job.stages - 1 for each in message.boundaries or ()),
    Unreplayable: lambda message, speaker, job, state: message.lacks is None or 0 <= message.lacks < job.stages,
}
"""By class, whether the job can have what a message names, or why not, in words."""


def _of_report(message: SurvivorReport, state: JobState) -> str | None:
    """What is wrong with a report for the newest generation."""
    committed = state.committed
    try:
        held, drawn = PackedData(message.held), unpack_drawn(message.held_draws)
        held.check()
        steps = [*drawn, *map(int, message.places), *(each.step for each in held.names)]
    except ValueError as error:
        return f"nobody can read what it reports to hold: {error}"
    if message.loaded:
        return None
    if not committed <= message.stepped <= committed + 1:  # of a newcomer too, which has followed so far
        return f"it has applied {message.stepped} steps, and {committed} are committed"
    stages = range(state.attendance.shape.stages)
    if max(steps, default=0) >= unstarted(committed) or not all(each.stage in stages for each in held.names):
        return f"it holds what is nowhere yet: {str(message)[:SHOWN]}"
    before = state.regrouping.report(message.worker)
    if before is not None and _says(before) != _says(message):
        return f"it reports twice for generation {message.generation}, and not the same"
    return None


def _says(report: SurvivorReport) -> tuple[Any, ...]:
    """What of a report counts."""
    return report.stepped, report.digest, report.held, report.held_draws, report.loaded, report.valid_from
