"""The positions of plain iterators in a checkpoint: a small file for each end of a replica that knows its position, and
one with the iterator's state (runtime/worker/iterator_states.py) if it has one.

Most scripts that go on from a checkpoint place their iterators themselves, so this is done only with the setting
``resume_iterators``. Such scripts skip the same number of batches on each replica. If workers were missing that is
wrong, since the others' iterators have given more: this is reported.
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
    ``iterators``: its number among the script's iterators, if that gives several in turn.
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
    """Add an end's files to a checkpoint's folder by ``add(path, into)``: ``place``, and the iterator's ``state``."""
    text = json.dumps(asdict(place)).encode()
    add(folder / f"{PREFIX}{seat}.json", lambda file: file.write(text))
    if state is not None:
        add(folder / f"{PREFIX}{seat}{STATE}", lambda file: file.write(state))


def state(folder: Path, replica: int) -> bytes | None:
    """Return the iterator state of ``replica`` in a checkpoint, if any. Raises RecycleError for an unreadable file."""
    file = next(iter(sorted(folder.glob(f"{PREFIX}{replica}.*{STATE}"))), None)
    try:
        return None if file is None else file.read_bytes()
    except OSError as error:
        raise RecycleError(f"load_checkpoint: {file} can't be read: {error}; load another checkpoint") from error


def read(folder: Path) -> dict[int, IteratorPlace]:
    """Return the places in a checkpoint by replica, as far as known. Raises RecycleError for an unreadable file."""
    found: dict[int, IteratorPlace] = {}
    for file in sorted(folder.glob(f"{PREFIX}*.json")):
        try:
            place = IteratorPlace(**json.loads(file.read_text()))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise RecycleError(f"load_checkpoint: {file} can't be read: {error}; load another checkpoint") from error
        found[place.replica] = place
    return found


@dataclass(frozen=True)
class ResumedIterators:
    """Where iterators begin: batches that each replica has had, and in a sentence what that changes, or ""."""

    read: tuple[int, ...]
    change: str = ""


def resumed(places: dict[int, IteratorPlace], replicas: int, size: int) -> ResumedIterators:
    """Return where the iterators of ``replicas``, with batches of ``size`` samples, begin after a checkpoint with
    ``places``.

    With the same replicas and size each begins where it stood. Else all begin where together they have given as many
    samples as the saved ones, rounded down. That is right for iterators that share one dataset in turn, as
    DistributedSampler deals it, and that have advanced evenly. Raises RecycleError if a place is not known, as after
    several iterators in turn.
    """
    before = next(iter(places.values()))
    missing = sorted(set(range(before.replicas)) - places.keys())
    if missing:
        raise RecycleError(
            f"recycle.resume_iterators: the checkpoint does not say how far the iterator of replica {missing[0]} was "
            "read, whose first and last stage were lost when it was saved; skip in the script, and set it to false"
        )
    if (several := max(each.iterators for each in places.values())) > 1:
        raise RecycleError(
            f"recycle.resume_iterators: the script that saved the checkpoint had given {several} iterators in "
            "turn, and may not give the same one first now; skip in the script, and set it to false"
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
            ", and since they had given unequal numbers, some samples between these places are used twice, others never"
        )
    )
    return ResumedIterators(
        (each,) * replicas,
        f"the checkpoint is of {before.replicas} replicas with {before.size} samples a batch, whose iterators had "
        f"given {shown(given)} batches, and here are {replicas} replicas with {size}: each iterator begins "
        f"after its batch {each}, which is right if replicas take turns on one data set; "
        f"{rest} samples are used twice{uneven}",
    )


def shown(given: dict[int, int]) -> str:
    """Return the numbers of batches as text, in the order of replicas."""
    return ", ".join(map(str, given.values()))
