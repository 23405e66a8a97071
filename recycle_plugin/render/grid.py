"""A schedule as a text grid: one row per seat, one column per tick.

Own micro-batches show their index (``F3``), rerouted ones their full name (``F1.3``); an instruction
that goes on shows ``=``, an idle tick ``.``.  Golden in tests, and drawn where a plan is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.instruction import STAGE_WIDE, Instruction
from recycle_plugin.core.vocabulary.span import Span
from recycle_plugin.planner.plan_error import VerificationError

IDLE, GOES_ON = ".", "="
HERE = "<-- HERE"


def cell(seat: Seat, instruction: Instruction) -> str:
    """The text of an instruction: ``F3`` for an own micro-batch, ``F1.3`` for one of another replica.

    What ends a step has the first letter: ``R``, ``T``, ``V``, ``S``.
    """
    if instruction.op in STAGE_WIDE:
        return instruction.op.value[0]
    micro_batch = instruction.micro_batch
    assert micro_batch is not None, f"{instruction} is of one"
    own = micro_batch.replica == seat.replica
    return f"{instruction.op.value}{micro_batch.index if own else micro_batch}"


def draw(spans: Iterable[Span], tick_us: int = 1, mark: tuple[Seat, Instruction] | None = None) -> str:
    """The grid of ``spans``, ``tick_us`` microseconds a column.  What takes less than half a tick is not drawn.

    ``mark``: this instruction is in brackets and its row ends in ``<-- HERE``. Raises ValueError for a tick that is not
    positive.
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
            row[first] = _marked(span.seat, span.instruction, mark)
    length = max((max(row) + 1 for row in rows.values() if row), default=0)
    return _table(rows, length, mark, lambda column: str(column))


def draw_programs(programs: Mapping[Seat, Iterable[Instruction]], mark: tuple[Seat, Instruction] | None = None) -> str:
    """The grid of programs in their own order, without time: for plans whose times mean nothing."""
    rows = {
        seat: {place: _marked(seat, one, mark) for place, one in enumerate(program)}
        for seat, program in sorted(programs.items())
    }
    return _table(rows, max((len(row) for row in rows.values()), default=0), mark, lambda column: str(column))


def draw_error(error: VerificationError) -> str:
    """What is wrong with a refused plan, and the grid that shows where."""
    mark = None if error.seat is None or error.instruction is None else (error.seat, error.instruction)
    return f"{error}\n{draw_programs(error.plan.programs, mark)}"


def _column(us: int, tick_us: int) -> int:
    return (2 * us + tick_us) // (2 * tick_us)


def _marked(seat: Seat, instruction: Instruction, mark: tuple[Seat, Instruction] | None) -> str:
    text = cell(seat, instruction)
    return f"[{text}]" if mark == (seat, instruction) else text


def _table(
    rows: Mapping[Seat, Mapping[int, str]],
    length: int,
    mark: tuple[Seat, Instruction] | None,
    title: Callable[[int], str],
) -> str:
    width = max([len(text) for row in rows.values() for text in row.values()] + [len(title(max(length - 1, 0)))])
    head = max((len(str(seat)) for seat in rows), default=0)

    def line(name: str, cells: Iterable[str]) -> str:
        return f"{name:>{head}} |" + " ".join(text.ljust(width) for text in cells) + "|"

    lines = [line("", (title(column) if column % 5 == 0 else "" for column in range(length)))]
    for seat, row in sorted(rows.items()):
        text = line(str(seat), (row.get(column, IDLE) for column in range(length)))
        lines.append(f"{text} {HERE}" if mark is not None and mark[0] == seat else text)
    return "\n".join(lines)
