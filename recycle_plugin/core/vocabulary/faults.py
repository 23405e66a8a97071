"""Injected faults by name, so that one script means the same in the simulator and in real processes.

``kill 0.1 before 1F0.2@5``: the worker of seat 0.1 dies when it is about to run stage 1's forward of micro-batch 0.2 in
step 5. ``kill 0.1 at recovery.report``: it dies when its recovery reaches that point for the first time
(``recovery.report:2``: for the second time). ``kill 0.1#1 at recovery.report``: the seat's second process dies there;
without a number the seat's first process does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.instruction import Instruction

KINDS = ("kill", "stop", "leave")
POINTS = (
    "recovery.start",
    "recovery.report",
    "recovery.resume",
    "recovery.undone",
    "recovery.parked",
    "step.end",
    "checkpoint.start",
    "checkpoint.file",
    "checkpoint.written",
    "checkpoint.publish",
    "checkpoint.named",
    "checkpoint.latest",
    "load.start",
    "load.end",
    "resize",
    "serving.told",
    "serving.given",
    "serving.hash",
)
_FORM = re.compile(
    r"(?P<kind>\w+) (?P<seat>\d+\.\d+)(?:#(?P<incarnation>\d+))? (?P<when>before|after|at) "
    r"(?P<where>[\w.<>@-]+)(?::(?P<count>\d+))?"
)


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault to inject: ``kind`` strikes the worker at ``seat`` when it is ``when`` (before, after or at) ``where``
    for the ``count``-th time. ``where`` is the text of an instruction or, after "at", one of POINTS. ``incarnation``:
    which process of the seat, from 0. Raises ValueError for an unknown kind or point, or text that is no instruction.
    """

    kind: str
    seat: Seat
    when: str
    where: str
    count: int = 1
    incarnation: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"fault kind {self.kind!r}: one of {', '.join(KINDS)}")
        if self.when == "at":
            if self.where.partition("@")[0] not in POINTS:
                raise ValueError(f"fault point {self.where!r}: one of {', '.join(POINTS)}")
        else:
            Instruction.parse(self.where)

    def __str__(self) -> str:
        process = f"#{self.incarnation}" if self.incarnation else ""
        times = f":{self.count}" if self.count > 1 else ""
        return f"{self.kind} {self.seat}{process} {self.when} {self.where}{times}"

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Return the fault that ``text`` describes, like ``kill 0.1 before 1F0.2@5``. Raises ValueError otherwise."""
        match = _FORM.fullmatch(" ".join(text.split()))
        if match is None:
            raise ValueError(
                f"{text!r} is no fault: write 'kill 0.1 before 1F0.2@5', 'kill 0.1 after 1STEP@5' or 'kill 0.1 at "
                "recovery.report'"
            )
        count, incarnation = int(match["count"] or 1), int(match["incarnation"] or 0)
        return cls(match["kind"], Seat.parse(match["seat"]), match["when"], match["where"], count, incarnation)


class FaultScript:
    """The faults of one process, the ``incarnation``-th at ``seat``; each strikes once. ``pending``: those to come."""

    def __init__(self, faults: tuple[Fault, ...], seat: Seat, incarnation: int = 0) -> None:
        self.pending = [fault for fault in faults if fault.seat == seat and fault.incarnation == incarnation]
        self._seen: dict[tuple[str, str], int] = {}

    def due(self, when: str, where: str) -> Fault | None:
        """Return the fault that strikes at ``where``, the text of an instruction or point, and drop it."""
        if not self.pending:
            return None
        self._seen[when, where] = self._seen.get((when, where), 0) + 1
        for fault in self.pending:
            if (fault.when, fault.where, fault.count) == (when, where, self._seen[when, where]):
                self.pending.remove(fault)
                return fault
        return None
