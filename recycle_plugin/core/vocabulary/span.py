"""Spans: the time of each executed instruction, for traces and pictures."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import replace
from typing import NamedTuple

from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.instruction import Instruction, Op


class Span(NamedTuple):
    """One executed instruction: start and end in integer microseconds of the world's clock."""

    seat: Seat
    instruction: Instruction
    start_us: int
    end_us: int


def run_again(spans: Iterable[Span]) -> dict[Span, Span]:
    """Return the spans whose work was lost or taken back, each with the next span of the same instruction. A B is made
    again by an I and its W.
    """
    last: dict[Hashable, Span] = {}
    found = {}
    for span in sorted(spans, key=lambda span: span.start_us):
        one = span.instruction
        key: Hashable = one if one.micro_batch else (span.seat, one)  # every worker has its own STEP
        if one.op is Op.B:
            key = replace(one, op=Op.I)
        if key in last:
            found[last[key]] = span
        last[key] = span
    return found
