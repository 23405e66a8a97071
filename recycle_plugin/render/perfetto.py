"""Spans as a trace for Perfetto (https://ui.perfetto.dev) in Chrome's trace event format.

One process per replica, one thread per stage; every data dependency between seats, derived from
``requires`` and ``provides``, is an arrow from who made a datum to the first who needed it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from recycle_plugin.core.vocabulary.dataflow import TRAVELS, Datum, provides, requires
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.instruction import COMPUTE, RECEIVES
from recycle_plugin.core.vocabulary.span import Span

CATEGORY = "dependency"


def events(spans: Iterable[Span], stages: int, moments: Mapping[str, int] = {}) -> list[dict[str, Any]]:
    """Trace events; times in microseconds, as the format wants them.

    ``moments``: what happened to the job, and when.
    """
    spans = sorted(spans, key=lambda span: (span.start_us, span.end_us, span.seat))
    marks = [
        {"ph": "i", "s": "g", "name": name, "cat": "job", "pid": 0, "tid": 0, "ts": at} for name, at in moments.items()
    ]
    return [*_names({span.seat for span in spans}), *map(_complete, spans), *_arrows(spans, stages), *marks]


def write(path: str | Path, spans: Iterable[Span], stages: int, moments: Mapping[str, int] = {}) -> None:
    """Write the trace of ``spans`` of a pipeline of ``stages`` stages to ``path`` (JSON)."""
    Path(path).write_text(json.dumps({"traceEvents": events(spans, stages, moments), "displayTimeUnit": "ms"}))


def _names(seats: set[Seat]) -> Iterator[dict[str, Any]]:
    for replica in sorted({seat.replica for seat in seats}):
        yield {"ph": "M", "name": "process_name", "pid": replica, "tid": 0, "args": {"name": f"replica {replica}"}}
    for seat in sorted(seats):
        title = {"name": f"stage {seat.stage} (seat {seat})"}
        yield {"ph": "M", "name": "thread_name", "pid": seat.replica, "tid": seat.stage, "args": title}


def _complete(span: Span) -> dict[str, Any]:
    instruction = span.instruction
    details: dict[str, Any] = {"step": instruction.step, "seat": str(span.seat)}
    if instruction.micro_batch is not None:
        details |= {
            "micro_batch": str(instruction.micro_batch),
            "rerouted": instruction.micro_batch.replica != span.seat.replica,
        }
    if instruction.peer is not None:
        details["peer"] = str(instruction.peer)
    return {
        "ph": "X",
        "name": str(instruction),
        "cat": instruction.op.name,
        "pid": span.seat.replica,
        "tid": span.seat.stage,
        "ts": span.start_us,
        "dur": span.end_us - span.start_us,
        "args": details,
    }


def _arrows(spans: list[Span], stages: int) -> Iterator[dict[str, Any]]:
    """From the producer to the receive, or to the consumer in traces without transport.

    What was made twice, in a step that was run again, counts from its last making before the need.
    """
    made: dict[Datum, list[Span]] = {}
    for span in spans:
        for datum in provides(span.instruction):
            if datum.kind in TRAVELS:
                made.setdefault(datum, []).append(span)
    drawn: set[tuple[Datum, Seat, int]] = set()
    for span in spans:
        if span.instruction.op not in RECEIVES | COMPUTE:
            continue
        for datum in requires(span.instruction, stages):
            source = next((one for one in reversed(made.get(datum, ())) if one.start_us <= span.start_us), None)
            if source is None or source.seat == span.seat or (datum, span.seat, source.start_us) in drawn:
                continue
            drawn.add((datum, span.seat, source.start_us))
            yield from _arrow(len(drawn), str(datum), source, span)


def _arrow(identity: int, name: str, source: Span, target: Span) -> Iterator[dict[str, Any]]:
    common = {"cat": CATEGORY, "name": name, "id": identity}
    # an arrow starts on a slice only if it starts before the slice ends
    inside = max(source.start_us, source.end_us - 1)
    yield common | {"ph": "s", "pid": source.seat.replica, "tid": source.seat.stage, "ts": inside}
    yield common | {
        "ph": "f",
        "bp": "e",
        "pid": target.seat.replica,
        "tid": target.seat.stage,
        "ts": max(inside, target.start_us),
    }
