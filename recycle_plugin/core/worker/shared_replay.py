"""Which live workers help a worker that replays its stage, and which part of a step each computes (SWIFT, PPoPP'23,
section 5.2).

While a stage is replayed all live workers wait for it. So each of them can compute gradients of that stage
(core/worker/helper.py), given its layer specs, the logs, and its weights before each step:

* The blocks of a step (core/vocabulary/blocks.py) are dealt in turn, to the replaying worker and then to each helper:
  block ``i`` of ``n`` goes to number ``i mod (helpers + 1)``, so that a step takes as long as ``ceil(n / (helpers +
  1))`` blocks. A helper's part is its *lot*.
* A lot comes with the weights, and a *share* is returned: the sums of the lot's gradients, and its boundary tensors,
  which are logged. Sums are added in the blocks' order, so in exact mode they have the same bits whichever worker has
  made them.
* A newcomer of the same stage waits for the replay and helps like the others, from the first step after its answer.
* A helper that is lost, refuses or is late does not help again. Its lot is void, even if its share still arrives. Its
  blocks are dealt anew among the rest: at least the replaying worker is left.

Only the replaying worker sums, steps and logs, and it alone knows the lots. So nothing has to be agreed on, and if it
dies the help ends. Each step costs a copy of the weights and a sum of gradients for each helper (in exact mode for each
block), and one look at each member of the job.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from recycle_plugin.core.messages.from_coordinator import Replay
from recycle_plugin.core.messages.from_workers import Note
from recycle_plugin.core.vocabulary.blocks import Block, Blocks
from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.vocabulary.roster import Member, WorkerId
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.core.worker.executor import Waits
from recycle_plugin.core.worker.shares import Answer, Call, Lot, Share, Word
from recycle_plugin.core.worker.stage_work import PartTimes, ReplayingMachine, StageWork
from recycle_plugin.core.worker.step_store import StepStore

SPAWN_S = 20.0  # seconds for which all wait for helpers to make the stage
LATE_S = 5.0  # seconds by which a share may come later than
LATE = 4  # so many times this worker's own share took


class Weights(Protocol):
    """A stage's weights, as a lot has them."""

    @property
    def nbytes(self) -> int:
        """Their size in bytes."""


class SharingMachine(ReplayingMachine, Protocol):
    """The part of a worker's machine that a replay with helpers needs."""

    @property
    def address(self) -> str:
        """The address of this worker for other workers."""

    def words(self) -> list[Word]:
        """Return the messages about its replay that this worker has received since the last call."""

    def tell(self, address: str, word: Word) -> None:
        """Send a word about its replay to the worker at ``address``, which may be gone."""

    def wait_share(self, what: str, until: float) -> Iterator[Any]:
        """Yield until a word may have come, a worker may be gone, or the clock is at ``until``. Raises JobEnded."""

    def weights(self) -> Weights:
        """Return the current weights of this worker's stage."""

    def add_share(self, step: int, sums: Any) -> None:
        """Add a share's sums to this worker's own."""

    def why_alone(self) -> str:
        """Return in words why no other worker can compute this stage; empty if others can."""


@dataclass(frozen=True)
class Dealt:
    """A lot, and the helper that computes it."""

    helper: Member
    lot: Lot


class Helpers:
    """The helpers of the worker on ``machine``, which replays the stage of ``store`` in a pipeline of ``shape``.
    ``blocks``: in which gradients are added; ``limit``: how many may help, None for as many as there is work for.
    """

    def __init__(
        self,
        machine: SharingMachine,
        store: StepStore,
        shape: Topology,
        blocks: Blocks,
        limit: int | None = None,
    ) -> None:
        self._machine, self._store, self._shape, self._limit = machine, store, shape, limit
        self._stage, self._members = store.seat.stage, blocks.members()
        self._called: dict[WorkerId, Member] = {}  # called, and not answered yet
        self._ready: dict[WorkerId, Member] = {}  # helpers, in the order in which they were called
        self._dealt: dict[int, Dealt] = {}
        self._shares: dict[int, tuple[Lot, Share]] = {}  # of the current step
        self._beside: set[WorkerId] = set()  # newcomers of this stage that were called
        self._most = self._size = 0  # how many may help, and the bytes of the weights
        self._number = self._lots = self._bytes = 0
        self._left: list[str] = []  # who did not help, or no longer, and why
        self._why_alone = ""

    # --- who ---------------------------------------------------------------------------------------

    def call(self, replay: Replay) -> None:
        """Ask live workers to make the stage ready, unless nothing can be shared."""
        self._called, self._ready, self._dealt, self._shares = {}, {}, {}, {}
        self._left, self._lots, self._bytes = [], 0, 0
        self._beside, self._most = set(), 0
        self._why_alone = self._find_why_alone(replay)
        if self._why_alone:
            return
        most, self._size, self._places = len(self._members) - 1, self._machine.weights().nbytes, replay.logs
        self._most = most if self._limit is None else min(most, self._limit)
        for member in replay.helpers[: self._most]:
            self._ask(member)

    def _ask(self, member: Member) -> None:
        self._called[member.worker] = member
        self._tell(member, Call(self._worker, self._machine.address, self._stage, self._size, self._places))

    def _ask_beside(self) -> None:
        """Ask newcomers of this stage, once each."""
        for member in self._machine.control_view.beside:
            if member.worker not in self._beside and len(self._called) + len(self._ready) < self._most:
                self._beside.add(member.worker)
                self._ask(member)

    def _find_why_alone(self, replay: Replay) -> str:
        if self._limit == 0:
            return "recycle.log.helpers is 0"
        if len(replay.stages) > 1:
            return f"{len(replay.stages)} stages are replayed at once"
        if self._shape.tie(self._stage):
            return "the stage shares weights with others"
        if len(self._members) == 1:
            return (
                "all micro-batches of a step are one block, which one worker adds up: a number as recycle.exact cuts it"
            )
        if replay.step == replay.committed:
            return "there is no step to replay"
        return self._machine.why_alone()

    def gather(self) -> Iterator[Any]:
        """Return when each called helper has answered or is gone, or after SPAWN_S seconds. A later answer is still
        accepted.
        """
        until = self._machine.clock() + SPAWN_S
        while self._called and self._machine.clock() < until:
            self._listen()
            for member in [each for each in self._called.values() if self._is_gone(each)]:
                del self._called[self._note_left(member, "it was lost").worker]
            if self._called:
                yield from self._machine.wait_share(f"{len(self._called)} helpers of the replay", until)

    def _lost(self, members: Any, until: float) -> list[Member]:
        """Return those of ``members`` that are gone, and all of them if the clock is at ``until``."""
        late = self._machine.clock() >= until
        found = [(member, "it was lost" if self._is_gone(member) else "it was late") for member in members]
        return [self._note_left(member, why) for member, why in found if late or why == "it was lost"]

    def _is_gone(self, member: Member) -> bool:
        view = self._machine.control_view
        if member.worker in self._beside:
            return member not in view.beside
        return view.others is not None and member.worker not in view.others.workers

    def _note_left(self, member: Member, why: str) -> Member:
        self._left.append(f"{member}: {why}")
        return member

    # --- a step ------------------------------------------------------------------------------------

    def run(self, work: StageWork, step: int, times: PartTimes) -> Iterator[Any]:
        """Have all of the stage's gradients of ``step`` made, here and by helpers."""
        blocks = sorted(self._members)
        self._shares = {}
        while blocks:
            with times.of("parameters"):
                own = self._deal(step, blocks)
            began = self._machine.clock()
            with times.of("compute"):
                yield from work.run(step, [one for block in own for one in self._members[block]])
            patience = LATE_S + LATE * (self._machine.clock() - began)
            with times.of("wait"):
                blocks = yield from self._collect(step, self._machine.clock() + patience)
        with times.of("reduce"):
            for number in sorted(self._shares):
                self._take(work, *self._shares[number])

    def _deal(self, step: int, blocks: Sequence[Block]) -> Sequence[Block]:
        """Deal ``blocks`` of ``step``; return those that are this worker's own."""
        helpers = [self._ready[worker] for worker in sorted(self._ready)][: len(blocks) - 1]
        weights = self._machine.weights() if helpers else None
        for place, member in enumerate(helpers, 1):
            self._number += 1
            lot = Lot(self._worker, self._number, step, tuple(blocks[place :: len(helpers) + 1]), weights)
            self._dealt[lot.number] = Dealt(member, lot)
            self._tell(member, lot)
            self._lots += 1
            self._bytes += weights.nbytes if weights is not None else 0
        return blocks[:: len(helpers) + 1]

    def _collect(self, step: int, until: float) -> Waits[list[Block]]:
        """Wait for the shares; the value is the blocks of helpers that are gone, have refused, or are late."""
        void: list[Block] = []
        while True:
            self._listen()
            for member in self._lost([each.helper for each in self._dealt.values()], until):
                self._ready.pop(member.worker, None)
            for number, dealt in list(self._dealt.items()):
                if dealt.helper.worker not in self._ready:
                    void += self._dealt.pop(number).lot.blocks
            if not self._dealt:
                return sorted(void)
            yield from self._machine.wait_share(f"{len(self._dealt)} shares of step {step}", until)

    def _listen(self) -> None:
        self._ask_beside()
        for word in self._machine.words():
            if isinstance(word, (Answer, Share)) and word.to == self._worker:
                self._hear(word)

    def _hear(self, word: Answer | Share) -> None:
        if isinstance(word, Share):
            dealt = self._dealt.pop(word.number, None)
            if dealt is not None:
                self._shares[word.number] = dealt.lot, word
        elif word.why:
            member = self._called.pop(word.by, None) or self._ready.pop(word.by, None)
            if member is not None:
                self._note_left(member, word.why)
        elif word.by in self._called:
            self._ready[word.by] = self._called.pop(word.by)

    def _take(self, work: StageWork, lot: Lot, share: Share) -> None:
        """Add a helper's share: add up its gradients, and log its boundary tensors."""
        for micro_batch in [one for block in lot.blocks for one in self._members[block]]:
            self._store.put(Datum("wgrad", self._stage, micro_batch, lot.step))  # which may be there once only
        self._machine.add_share(lot.step, share.sums)
        for datum, value in share.kept:
            work.keep(datum, value)

    # --- what is said ------------------------------------------------------------------------------

    def report(self, replay: Replay, times: PartTimes) -> int:
        """Report how many workers have helped, or why none has, and how long each part took. Return how many helped to
        the end.
        """
        helped = sorted(self._ready)
        left = [*self._left, *(f"{member}: it has not answered" for member in self._called.values())]
        why = self._why_alone or "; ".join(left) or "no other worker is there"
        took = ", ".join(f"{part} {seconds:.3f} s" for part, seconds in sorted(times.seconds.items()))
        text = (
            f"{len(helped)} workers have helped to replay stage {self._stage} up to step {replay.committed}, with "
            f"{self._lots} shares and {self._bytes / 1e6:.1f} MB of parameters sent"
            if self._lots
            else f"no worker has helped to replay stage {self._stage}: {why}"
        )
        details = {
            "stage": self._stage,
            "helpers": len(helped),
            "ranks": [worker.rank for worker in helped],
            "why": "" if self._lots else why,
            "left": left,
            "lots": self._lots,
            "parameters_bytes": self._bytes,
            "seconds": {part: round(seconds, 4) for part, seconds in times.seconds.items()},
        }
        self._machine.send(Note(self._worker.rank, "helpers", f"{text} ({took})", details))
        return len(helped)

    @property
    def _worker(self) -> WorkerId:
        return self._machine.control_view.worker

    def _tell(self, member: Member, word: Word) -> None:
        self._machine.tell(member.address, word)
