"""Traces of workers, one span a line, so that a killed worker's trace ends where it died."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.instruction import Instruction
from recycle_plugin.core.vocabulary.span import Span
from recycle_plugin.core.worker.observer import Observer
from recycle_plugin.observability.telemetry import LineFile, Say


class TraceFile(Observer):
    """A worker's trace ``<folder>/<seat>.txt``: instruction, start and end in µs since the epoch. ``named``: gives a
    span the name of what has run in it; None leaves it out.
    """

    def __init__(self, folder: Path, seat: Seat, say: Say, named: Callable[[Span], Span | None] | None = None) -> None:
        self._lines, self._named = LineFile(folder / f"{seat}.txt", say), named

    def ran(self, span: Span) -> None:
        found = span if self._named is None else self._named(span)
        if found is not None:
            self._lines.add(f"{found.instruction} {found.start_us} {found.end_us}")

    def close(self) -> None:
        self._lines.close()


def read_traces(folder: Path) -> list[Span]:
    """Return all workers' spans, ordered by their start; a last line that its worker did not complete is left out.
    Raises ValueError that names the file and the line if one is no span.
    """
    spans = []
    for path in sorted(folder.glob("*.txt")):
        try:
            seat = Seat.parse(path.stem)
        except ValueError:
            raise ValueError(f"{path} is no worker's trace: its name is no seat's") from None
        *lines, _ = path.read_bytes().split(b"\n")
        for number, line in enumerate(lines, 1):
            try:
                instruction, start, end = line.decode().split()
                spans.append(Span(seat, Instruction.parse(instruction), int(start), int(end)))
            except ValueError:
                shown = line.decode(errors="replace")[:60].strip()
                raise ValueError(f"{path}, line {number} is no span: {shown}") from None
    return sorted(spans, key=lambda span: (span.start_us, span.seat))
