"""Which weight gradients a step's sums are made of, worked out from the traces and events of a real job.

What was run is more than what counts: a worker's gradients go down with it, and those made with weights that are
rejected are void.  So this keeps, in the order of time, what each worker has added up, and what its stage's sum is made
of.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.instruction import Op
from recycle_plugin.core.vocabulary.span import Span
from recycle_plugin.observability.trace import read_traces
from tests.support.cluster import Result

Place = tuple[int, int]  # stage, step


class Books:
    """What all workers have added up so far.

    ``sums``: of which micro-batches' gradients the stage's sum of the step is made, and how often of each.
    """

    def __init__(self) -> None:
        self.sums: dict[Place, Counter[MicroBatch]] = {}
        self._parts: dict[Place, dict[Seat, Counter[MicroBatch]]] = defaultdict(lambda: defaultdict(Counter))
        self._holders: dict[Place, set[Seat]] = defaultdict(set)  # of the sum

    def run(self, span: Span) -> None:
        """The first to end its REDUCE has what all have added up; whoever reduces later takes it from there."""
        seat, instruction = span.seat, span.instruction
        place = instruction.stage, instruction.step
        if instruction.op in (Op.W, Op.B):
            self._parts[place][seat][instruction.micro_batch] += 1
        elif instruction.op is Op.REDUCE:
            self.sums.setdefault(place, sum(self._parts[place].values(), Counter()))
            self._holders[place].add(seat)

    def lose(self, seat: Seat) -> None:
        """What it alone had is gone."""
        for place, parts in self._parts.items():
            parts.pop(seat, None)
            self._holders[place].discard(seat)
            if not self._holders[place]:
                self.sums.pop(place, None)

    def void(self, after: int) -> None:
        """What was computed of the steps after ``after``."""
        for place in [place for place in self._parts if place[1] > after]:
            del self._parts[place]
            self._holders.pop(place, None)
            self.sums.pop(place, None)


def counted(result: Result) -> dict[Place, Counter[MicroBatch]]:
    """:attr:`Books.sums` at the end of a job with ``recycle.trace``.

    What happens to the membership holds from the next ``resume`` on: before it all have stopped, and nobody goes on
    before it is said.
    """
    books, happened = Books(), []
    told = [(event["time"], event) for event in result.events if event["event"] in ("lost", "rejected", "resume")]
    ran = [(span.end_us / 1e6, span) for span in read_traces(result.folder / "trace")]
    for _, what in sorted([*told, *ran], key=lambda timed: timed[0]):
        if isinstance(what, Span):
            books.run(what)
        elif what["event"] != "resume":
            happened.append(what)
        else:
            for event in happened:
                books.lose(Seat.parse(event["seat"])) if event["event"] == "lost" else books.void(event["step"])
            happened.clear()
    return books.sums
