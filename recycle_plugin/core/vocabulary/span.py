"""Spans: the time of each executed instruction, for traces and pictures."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import NamedTuple

from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.instruction import Instruction


class Span(NamedTuple):
    """One executed instruction: start and end in integer microseconds of the world's clock."""

    seat: Seat
    instruction: Instruction
    start_us: int
    end_us: int


def run_again(spans: Iterable[Span]) -> dict[Span, Span]:
    """Return the spans whose work was lost or taken back, each with the next span of the same instruction."""
    last: dict[Hashable, Span] = {}
    found = {}
    for span in sorted(spans, key=lambda span: span.start_us):
        # every worker has its own STEP
        key = span.instruction if span.instruction.micro_batch else (span.seat, span.instruction)
        if key in last:
            found[last[key]] = span
        last[key] = span
    return found
