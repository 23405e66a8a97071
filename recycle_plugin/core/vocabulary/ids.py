"""Identities: a seat keeps its name when its worker is gone, and a micro-batch its own whoever runs it."""

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
        """The number by which instructions and data name the layers that the seat's worker holds: its stage's."""
        return self.stage

    def __str__(self) -> str:
        return f"{self.replica}.{self.stage}"

    @classmethod
    def parse(cls, text: str) -> Seat:
        """Return the seat that ``text``, for instance ``1.2``, names. Raises ValueError that shows the form."""
        return cls(*_pair(text, "seat", "replica.stage"))


class MicroBatch(NamedTuple):
    """Micro-batch ``index`` of the data that belongs to logical replica ``replica``. Text form ``replica.index``."""

    replica: int
    index: int

    def __str__(self) -> str:
        return f"{self.replica}.{self.index}"

    @classmethod
    def parse(cls, text: str) -> MicroBatch:
        """Return the micro-batch that ``text``, for instance ``1.2``, names. Raises ValueError that shows the form."""
        return cls(*_pair(text, "micro-batch", "replica.index"))


def _pair(text: str, what: str, form: str) -> tuple[int, int]:
    left, dot, right = text.partition(".")
    if not (dot and left.isdecimal() and right.isdecimal()):
        raise ValueError(f"{text!r} is no {what}: write {form}, for instance 1.2")
    return int(left), int(right)
