"""Spans: what was executed when, as traces and pictures have it."""

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
    """The spans whose work was lost or taken back, each with the span in which its instruction was next run, by
    whichever worker.  Costs the number of spans, times the logarithm of that.
    """
    last: dict[Hashable, Span] = {}
    found = {}
    for span in sorted(spans, key=lambda span: span.start_us):
        # everybody has a STEP of his own
        key = span.instruction if span.instruction.micro_batch else (span.seat, span.instruction)
        if key in last:
            found[last[key]] = span
        last[key] = span
    return found
