"""Names of seats and micro-batches. Neither depends on the worker that holds the seat or computes the micro-batch."""

from __future__ import annotations

from typing import NamedTuple


class Seat(NamedTuple):
    """A place in the pipeline, ``replica.stage``: one stage of one replica, held by one worker. Seats of the same stage
    are peers. The layers that a seat's worker holds are its ``chunk``.
    """

    replica: int
    stage: int

    @property
    def chunk(self) -> int:
        """The number of the seat's layers in instructions and data: its stage."""
        return self.stage

    def __str__(self) -> str:
        return f"{self.replica}.{self.stage}"

    @classmethod
    def parse(cls, text: str) -> Seat:
        """Return the seat named by ``text``, such as ``1.2``. Raises ValueError that shows the form."""
        return cls(*_pair(text, "seat", "replica.stage"))


class MicroBatch(NamedTuple):
    """Micro-batch ``index`` of the data that belongs to logical replica ``replica``. Text form ``replica.index``."""

    replica: int
    index: int

    def __str__(self) -> str:
        return f"{self.replica}.{self.index}"

    @classmethod
    def parse(cls, text: str) -> MicroBatch:
        """Return the micro-batch named by ``text``, such as ``1.2``. Raises ValueError that shows the form."""
        return cls(*_pair(text, "micro-batch", "replica.index"))


def _pair(text: str, what: str, form: str) -> tuple[int, int]:
    left, dot, right = text.partition(".")
    if not (dot and left.isdecimal() and right.isdecimal()):
        raise ValueError(f"{text!r} is no {what}: write {form}, for instance 1.2")
    return int(left), int(right)
