"""Confused workers, and what the coordinator makes of what can't be.

A word of a worker says where it belongs: to a generation, a step, micro-batches, a seat.  It may be wrong there in two
ways:

* It is *old*: of a generation, a step or a barrier that is over, or said once more.  News overtake each other, so that
  is nobody's fault, and it is dropped where it would be taken in.
* It *can't be*: it names a generation that was never published, a step that nobody can have begun, what the job does
  not have, or the contrary of what the same worker has said before.  Whoever says so is given up as if it had died,
  since its next word may be as wrong and look right.

So a confused worker costs itself, and a regrouping.  What it can't cost is a wrong number, another worker, or the job
as long as that can go on without it; nor can it make the coordinator keep more than its share.

A worker's word on what it alone knows is believed: its losses and hashes, that it has applied the step that is next,
whom it does not hear in the generation in force; and the words whose meaning is the end of the job are what they say
(Fatal, Terminate, Left and, in a job that logs, Through).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from recycle_plugin.core.coordinator import boards
from recycle_plugin.core.messages.contributions import LOSS, NORM, SHARE
from recycle_plugin.core.messages.from_workers import (
    BarrierReached,
    CheckpointLoaded,
    Contribution,
    Durable,
    Missing,
    OutOfData,
    Post,
    ReadBoard,
    Resized,
    Serving,
    Stepped,
    SurvivorReport,
    Through,
    Unreplayable,
    Vanishing,
    WantResult,
)
from recycle_plugin.core.messages.job_spec import JobSpec
from recycle_plugin.core.messages.of_worker import OfWorker
from recycle_plugin.core.vocabulary.commit_rule import unstarted
from recycle_plugin.core.vocabulary.dataflow import unpack
from recycle_plugin.core.vocabulary.iterator_draws import unpack as unpack_drawn
from recycle_plugin.core.vocabulary.roster import Member

if TYPE_CHECKING:
    from recycle_plugin.core.coordinator.course import Course

OF_GENERATIONS = (
    SurvivorReport,
    OutOfData,
    CheckpointLoaded,
    Resized,
    Stepped,
    BarrierReached,
    Missing,
    Post,
    ReadBoard,
    WantResult,
)


def why_confused(message: OfWorker, course: Course) -> str:
    """Why nobody in its right mind can have said ``message`` by now, in words; empty where somebody may have, or where
    it is said of nobody who takes part.
    """
    speaker, job = course.speaker(message.worker), course.job
    if speaker is None or job is None:
        return ""
    newest = course.regrouping.generation
    if isinstance(message, OF_GENERATIONS) and message.generation > newest:
        return f"it speaks of generation {message.generation}, and the newest is {newest}"
    match message:
        case Stepped():
            return _of_step(message.step, course.committed + 1, "has applied", course)
        case OutOfData():
            return _of_step(message.step, unstarted(course.committed) - 1, "has no data for", course)
        case Contribution():
            return _of_contribution(message, speaker, job, course)
        case SurvivorReport():
            return _of_report(message, speaker, course)
        case Post() | ReadBoard() if not course.boards.has_room(message):
            return (
                f"it posts or asks for more than is kept of one worker ({boards.SHARE >> 20} MiB), on {message.board!r}"
            )
        case Resized() if message.micro_batches < 1:
            return f"it plans for {message.micro_batches} micro-batches"
        case Vanishing():
            return _of_step(message.step, course.committed, "ends after", course)
        case Through() if not job.log:
            return "it waits until it may go, and nothing is logged"
        case Serving():
            return _of_serving(message, speaker, course)
        case Durable() if not all(0 <= each < job.stages - 1 for each in message.boundaries or ()):
            return f"it is to log boundaries {list(message.boundaries or ())} of {job.stages} stages"
        case Unreplayable() if message.lacks is not None and not 0 <= message.lacks < job.stages:
            return f"it lacks what stage {message.lacks} of {job.stages} has sent"
    return ""


def _of_step(step: int, last: int, what: str, course: Course) -> str:
    return f"it {what} step {step}, and only step {course.committed} is committed" if step > last else ""


def _of_contribution(message: Contribution, speaker: Member, job: JobSpec, course: Course) -> str:
    """What is wrong with numbers of a step: whose they are, and of how many."""
    if wrong := _of_step(message.step, unstarted(course.committed) - 1, f"has a {message.name} of", course):
        return wrong
    stages, shape = job.stages, course.attendance.shape
    whole = len(shape.batch)
    if message.name == LOSS:
        names = {str(one) for one in shape.batch}
        counts = range(shape.micro_batches, whole + 1, shape.micro_batches) if job.policy.shrinks else (whole,)
    elif message.name in (NORM, SHARE):
        names, counts = {str(speaker.seat.stage)}, (stages,)
    else:
        return f"it has a number of step {message.step} that is called {message.name!r}"
    said = f"its {message.name} of step {message.step}"
    if message.step <= course.committed:
        return ""  # of another size, perhaps
    if strange := sorted(message.values.keys() - names):
        return f"{said} is of {', '.join(strange)}, which it can't have"
    if message.expected not in counts:
        return f"{said} is one of {message.expected}, and there are {' or '.join(map(str, counts))}"
    if message.shard != speaker.shard:
        return f"{said} is of shard {message.shard}, and it is shard {speaker.shard}"
    return ""


def _of_report(message: SurvivorReport, speaker: Member, course: Course) -> str:
    """What is wrong with a report for the newest generation."""
    if message.generation != course.regrouping.generation:
        return ""
    last = unstarted(course.committed)
    try:
        held, drawn = unpack(message.held), unpack_drawn(message.held_draws)
        places = [int(step) for step in message.places]
    except ValueError as error:
        return f"nobody can read what it reports to hold: {error}"
    if message.loaded:
        return ""
    if (wrong := _of_step(message.stepped, course.committed + 1, "has applied", course)) or message.stepped < 0:
        return wrong or f"it has applied {message.stepped} steps"
    if message.stepped < course.committed and course.joining.get(message.worker) is None:
        return f"it has applied {message.stepped} steps, and has said so of step {course.committed}"
    stages = course.attendance.shape.stages
    if strange := [each for each in held if not 0 <= each.stage < stages or each.step > last]:
        return f"it holds {min(map(str, strange))}, which is nowhere yet"
    if strange_steps := [step for step in (*drawn, *places) if step > last]:
        return f"it has drawn for step {max(strange_steps)}, and only step {course.committed} is committed"
    before = course.regrouping.report(message.worker)
    if before is not None and _says(before) != _says(message):
        return f"it reports twice for generation {message.generation}, and not the same"
    return ""


def _says(report: SurvivorReport) -> tuple[Any, ...]:
    """What of a report counts."""
    return report.stepped, report.digest, report.held, report.held_draws, report.loaded, report.valid_from


def _of_serving(message: Serving, speaker: Member, course: Course) -> str:
    newcomer = course.joining.get(message.newcomer)
    if newcomer is None or (newcomer.stage, newcomer.member.shard) == (speaker.seat.stage, speaker.shard):
        return ""
    return f"it serves {newcomer.member}, whose state it does not have"
