"""Where plain iterators stood when a checkpoint was saved: a small file for each end that knows it, beside the
framework's files, and one with its state (runtime/worker/iterator_states.py) where it has one.

Scripts that go on from a checkpoint mostly know by themselves where to begin, so iterators are advanced only where the
setting ``resume_iterators`` asks for it.  Such scripts skip the same on each replica, which is wrong where workers were
missing: then the others' iterators have given more, and that is said.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.errors import RecycleError

PREFIX, STATE = "recycle_iterator_", ".pt"


@dataclass(frozen=True)
class IteratorPlace:
    """An iterator has given ``read`` batches of ``size`` samples to an end of ``replica``, one of ``replicas``.

    ``iterators``: it is the script's so manieth, where that gives several in turn.
    """

    replica: int
    replicas: int
    read: int
    size: int
    iterators: int


def write(
    add: Callable[[Path, Callable[[Any], object]], None],
    folder: Path,
    seat: Seat,
    place: IteratorPlace,
    state: bytes | None = None,
) -> None:
    """Have the files of the end at ``seat`` written to a checkpoint's folder, by ``add(path, into)``: its ``place``,
    and the ``state`` of an iterator that has one.
    """
    text = json.dumps(asdict(place)).encode()
    add(folder / f"{PREFIX}{seat}.json", lambda file: file.write(text))
    if state is not None:
        add(folder / f"{PREFIX}{seat}{STATE}", lambda file: file.write(state))


def state(folder: Path, replica: int) -> bytes | None:
    """The state of the iterator of ``replica`` that a checkpoint has, of either end; None where it has none.

    Raises RecycleError for a file that can't be read.
    """
    file = next(iter(sorted(folder.glob(f"{PREFIX}{replica}.*{STATE}"))), None)
    try:
        return None if file is None else file.read_bytes()
    except OSError as error:
        raise RecycleError(f"load_checkpoint: {file} can't be read: {error}; load another checkpoint") from error


def read(folder: Path) -> dict[int, IteratorPlace]:
    """The places that a checkpoint has, by replica; none of replicas both of whose ends were lost.

    Raises RecycleError for a file that can't be read.
    """
    found: dict[int, IteratorPlace] = {}
    for file in sorted(folder.glob(f"{PREFIX}*.json")):
        try:
            place = IteratorPlace(**json.loads(file.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise RecycleError(f"load_checkpoint: {file} can't be read: {error}; load another checkpoint") from error
        found[place.replica] = place
    return found


@dataclass(frozen=True)
class ResumedIterators:
    """Where iterators begin in a job that goes on: how many batches each replica's has had, and what that changes in a
    sentence, empty where nothing.
    """

    read: tuple[int, ...]
    change: str = ""


def resumed(places: dict[int, IteratorPlace], replicas: int, size: int) -> ResumedIterators:
    """Where the iterators of ``replicas`` begin, with batches of ``size`` samples, after a checkpoint with ``places``.

    With as many replicas and as large batches, each where it stood.  Else all begin where together they have given as
    many samples as those had, rounded down: that is right for iterators which share one data set out in turn, as
    DistributedSampler does, and which have gone on evenly.  Raises RecycleError where a place is not known, as after
    several iterators in turn.
    """
    before = next(iter(places.values()))
    missing = sorted(set(range(before.replicas)) - places.keys())
    if missing:
        raise RecycleError(
            f"recycle.resume_iterators: the checkpoint does not say how far the iterator of replica {missing[0]} was "
            "read, both of whose ends were lost when it was saved; skip in the script, and set it to false"
        )
    if (several := max(each.iterators for each in places.values())) > 1:
        raise RecycleError(
            f"recycle.resume_iterators: the script that has saved the checkpoint had given {several} iterators in "
            "turn, and nobody knows which of them one that goes on gives first; skip in the script, and set it to false"
        )
    given = {each.replica: each.read for each in sorted(places.values(), key=lambda each: each.replica)}
    if (replicas, size) == (before.replicas, before.size):
        return ResumedIterators(tuple(given.values()))
    samples = sum(given.values()) * before.size
    each, rest = divmod(samples, replicas * size)
    uneven = (
        ""
        if len(set(given.values())) == 1
        else (
            ", and since they have not gone on evenly, some samples between these places are used twice, others never"
        )
    )
    return ResumedIterators(
        (each,) * replicas,
        f"the checkpoint is of {before.replicas} replicas with {before.size} samples a batch, whose iterators had "
        f"given {shown(given)} batches, and here are {replicas} replicas with {size}: each iterator begins "
        f"behind its batch {each}, right where replicas share one data set out in turn; "
        f"{rest} samples are used twice{uneven}",
    )


def shown(given: dict[int, int]) -> str:
    """The numbers of batches, in the order of replicas."""
    return ", ".join(map(str, given.values()))
