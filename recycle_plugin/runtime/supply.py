"""What a worker of the first or last stage does with a plain iterator: draw, hand on, keep.  The rules: core/sources.py."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple

from recycle_plugin.core.dataflow import Datum
from recycle_plugin.core.ids import MicroBatch, Seat
from recycle_plugin.core.sources import Batches, Draw, Share, Standing, pack, share
from recycle_plugin.core.watch import ELSEWHERE
from recycle_plugin.runtime.batches import described, packed, unpacked
from recycle_plugin.runtime.errors import RecycleError
from recycle_plugin.runtime.session import Session
from recycle_plugin.runtime.transport import Tensors, Transport

KIND = "drawn"


class Batch(NamedTuple):
    draw: Draw
    tensors: Tensors


class Supply:
    """Of the worker at ``seat``.  ``read(what)`` gives the iterator's next batch, inputs and labels; ``what`` names it in errors."""

    def __init__(self, session: Session, transport: Transport, seat: Seat, read: Callable[[str], Any]) -> None:
        self._session, self._transport, self._seat, self._read = session, transport, seat, read
        self._batches: dict[int, dict[MicroBatch, Batch]] = {}
        self._read_so_far: dict[int, int] = {}  # how often the iterator was asked in a step
        self._read_in_all = 0
        self._takers: set[str] = set()
        self._standing: Standing | None = None
        self._usual: Share | None = None  # of a step of which nobody has anything yet
        self._said: set[int] = set()

    def drawn(self) -> dict[str, str]:
        """What is here, for the others."""
        self._collect()
        return pack({step: {one: batch.draw for one, batch in batches.items()} for step, batches in self._batches.items()})

    def stand(self, standing: Standing) -> None:
        self._standing, self._usual = standing, None

    def provide(self, step: int) -> None:
        """Before anything of ``step`` is run: draw what this worker has to, and send what others lack."""
        if self._session.is_committed(step):
            return  # by the others, who did not need what is here
        shared = self._share(step)
        self._say(step, shared.dealt)
        for draw, micro_batch in shared.of(self._seat):
            if micro_batch not in self._batches.get(step, ()):
                self._draw(step, micro_batch, draw)
        addresses = {member.seat: member.address for member in self._session.generation.members}
        for handout in shared.handouts:
            if handout.giver == self._seat:
                address = addresses[handout.taker]
                self._takers.add(address)
                datum = Datum(KIND, handout.taker.stage, handout.micro_batch, step)
                self._transport.send(address, datum, self._batches[step][handout.micro_batch].tensors)

    def wait_sent(self) -> None:
        """Return when the copies of all that was drawn here would survive this process."""
        if self._takers:
            self._transport.wait_sent(self._takers)
            self._takers.clear()

    def wait(self, step: int, micro_batch: MicroBatch) -> None:
        """Return when the batch is here.  Interruptible."""
        self._session.wait(lambda: f"the data of micro-batch {micro_batch}, step {step}", lambda: self._here(step, micro_batch))

    def take(self, step: int, micro_batch: MicroBatch) -> Any:
        """(inputs, labels), in memory of their own: the model may change them."""
        return unpacked(self._batches[step][micro_batch].tensors)

    def batches_read(self) -> int:
        """Where the iterator stands: how many it has given."""
        return self._read_in_all

    def skip_to(self, read: int) -> None:
        """The iterator stands where it stood when it had given ``read`` batches.  RecycleError where it is past that."""
        if read < self._read_in_all:
            raise RecycleError(f"the data iterator of seat {self._seat} has given {self._read_in_all} batches, and is to stand behind {read}: it can't be read "
                               "again; pass one that begins anew")  # fmt: skip
        while self._read_in_all < read:
            with self._session.heart.at(ELSEWHERE, "the data iterator"):
                self._read(f"batch {self._read_in_all}, which another worker has used")
            self._read_in_all += 1

    def drop(self, step: int) -> None:
        """``step`` is committed."""
        for old in [old for old in self._batches if old <= step]:
            del self._batches[old]

    def rewind(self) -> None:
        """Everybody goes on from a checkpoint, whose steps' data is read as if for the first time."""
        self._batches, self._read_so_far = {}, {}

    def _share(self, step: int) -> Share:
        if any(step in batches for batches in self._standing.drawn.values()) or step in self._standing.rests:
            return share(self._standing, step)
        if self._usual is None:
            self._usual = share(self._standing, step)
        return self._usual

    def _draw(self, step: int, micro_batch: MicroBatch, draw: Draw) -> None:
        while (count := self._read_so_far.get(step, 0)) <= draw.position:
            what = f"step {step}, at its micro-batch {count}"
            with self._session.heart.at(ELSEWHERE, "the data iterator"), self._session.at_work(f"the data of {what}"):
                batch = self._read(what)
            self._read_so_far = {step: count + 1}
            self._read_in_all += 1
        self._batches.setdefault(step, {})[micro_batch] = Batch(draw, packed(batch, draw))

    def _here(self, step: int, micro_batch: MicroBatch) -> bool | None:
        self._collect()
        return True if micro_batch in self._batches.get(step, ()) else None

    def _collect(self) -> None:
        for datum, tensors in self._transport.collect(KIND).items():
            self._batches.setdefault(datum.step, {})[datum.micro_batch] = Batch(Draw(*described(tensors)), tensors)

    def _say(self, step: int, dealt: Batches) -> None:
        """One of the first stage's workers does, once for each replica that is no source any more."""
        first = min(seat for seat in self._standing.plan.view.live if seat.stage == 0)
        retired = {one.replica for one in dealt} - self._said
        if self._seat != first or not retired:
            return
        self._said |= retired
        names, by = ", ".join(map(str, sorted(retired))), ", ".join(map(str, sorted({draw.source for draw in dealt.values()})))
        self._session.note(
            "data", f"from step {step} on the share of replica {names}, {len(dealt)} micro-batches a step, is drawn from the iterators of replica {by}",
            step=step, replicas=sorted(retired), drawn={str(one): str(draw) for one, draw in sorted(dealt.items())},
        )  # fmt: skip
