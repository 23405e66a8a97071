"""A schedule as a text grid: one row per seat, one column per tick.

Own micro-batches show their index (``F3``), rerouted ones their full name (``F1.3``). A continued instruction shows
``=``, an idle tick ``.``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.instruction import STAGE_WIDE, Instruction
from recycle_plugin.core.vocabulary.span import Span

IDLE, GOES_ON = ".", "="


def cell(seat: Seat, instruction: Instruction) -> str:
    """Return the text of an instruction: ``F3`` for an own micro-batch, ``F1.3`` for one of another replica.
    Instructions at the end of a step have their first letter: ``R``, ``T``, ``V``, ``S``.
    """
    if instruction.op in STAGE_WIDE:
        return instruction.op.value[0]
    micro_batch = instruction.micro_batch
    assert micro_batch is not None, f"{instruction} is of one"
    own = micro_batch.replica == seat.replica
    return f"{instruction.op.value}{micro_batch.index if own else micro_batch}"


def draw(spans: Iterable[Span], tick_us: int = 1) -> str:
    """Return the grid of ``spans``, ``tick_us`` microseconds a column, without spans of less than half a tick. Raises
    ValueError for a tick that is not positive.
    """
    if tick_us < 1:
        raise ValueError(f"tick_us is {tick_us}: it has to be at least 1 microsecond")
    spans = sorted(spans, key=lambda span: (span.seat, span.start_us))
    begin = min((span.start_us for span in spans), default=0)
    rows: dict[Seat, dict[int, str]] = {}
    for span in spans:
        row = rows.setdefault(span.seat, {})
        first, beyond = _column(span.start_us - begin, tick_us), _column(span.end_us - begin, tick_us)
        if first < beyond:
            row.update(dict.fromkeys(range(first, beyond), GOES_ON))
            row[first] = cell(span.seat, span.instruction)
    length = max((max(row) + 1 for row in rows.values() if row), default=0)
    return _table(rows, length)


def _column(us: int, tick_us: int) -> int:
    return (2 * us + tick_us) // (2 * tick_us)


def _table(rows: Mapping[Seat, Mapping[int, str]], length: int) -> str:
    width = max([len(text) for row in rows.values() for text in row.values()] + [len(str(max(length - 1, 0)))])
    head = max((len(str(seat)) for seat in rows), default=0)

    def line(name: str, cells: Iterable[str]) -> str:
        return f"{name:>{head}} |" + " ".join(text.ljust(width) for text in cells) + "|"

    lines = [line("", (str(column) if column % 5 == 0 else "" for column in range(length)))]
    for seat, row in sorted(rows.items()):
        lines.append(line(str(seat), (row.get(column, IDLE) for column in range(length))))
    return "\n".join(lines)
