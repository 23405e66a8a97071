"""A live worker's part in the replay of another stage, while it waits for that stage.

The helper builds the replayed stage from its layer specs, beside its own stage, and receives that stage's weights
before each step. It reads from the logs what the neighbouring stages had sent, and returns the sums of weight gradients
and the stage's outputs. Its own state stays untouched. If it refuses or meets an error it answers so; it never ends for
that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from recycle_plugin.core.vocabulary.blocks import Block, Blocks
from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.core.worker.control_view import ControlView
from recycle_plugin.core.worker.executor import Waits
from recycle_plugin.core.worker.shares import Answer, Call, Lot, Share, Word
from recycle_plugin.core.worker.stage_work import CantReplay, StageWork, WorkingMachine
from recycle_plugin.core.worker.step_store import StepStore


class CantHelp(Exception):
    """This worker can't help with a stage, and why."""


class HelpedStage(WorkingMachine, Protocol):
    """A stage that is not this worker's, made to help; generators as in Machine. Every error in it is a CantHelp."""

    @property
    def store(self) -> StepStore:
        """The data of the step that it is at."""

    def begin(self, step: int, weights: Any) -> None:
        """Take the stage's ``weights`` before ``step``, and drop all sums."""

    def sums(self, step: int, blocks: Sequence[Block]) -> Any:
        """Return the sums of the weight gradients of ``blocks``, as a share has them."""


class HelpingMachine(Protocol):
    """The part of a worker's machine that a helper needs; generators as in core.worker.machine.Machine."""

    @property
    def control_view(self) -> ControlView:
        """The worker's view of the control plane."""

    def words(self) -> list[Word]:
        """Return the messages about replays that this worker has received since the last call."""

    def tell(self, address: str, word: Word) -> None:
        """Send a word about a replay to the worker at ``address``, which may be gone."""

    def make_stage(self, call: Call) -> Waits[HelpedStage]:
        """Make the stage of ``call`` from its layer specs, beside this worker's own; the value. Raises CantHelp."""


class Helper:
    """The help of the worker on ``machine`` in replays of empty stages, in a pipeline of ``shape`` whose gradients are
    added in ``blocks``. ``splits``: backwards are split.
    """

    def __init__(self, machine: HelpingMachine, shape: Topology, blocks: Blocks, splits: bool) -> None:
        self._machine, self._shape, self._splits = machine, shape, splits
        self._members = blocks.members()
        self._call: Call | None = None
        self._stage: HelpedStage | None = None
        self._work: StageWork | None = None  # in ``_stage``
        self._kept: list[tuple[Datum, Any]] = []  # what the log is to have of the lot
        self._asked: list[Word] = []

    def asked(self) -> bool | None:
        """Return True if there is something to do for others, else None."""
        self._asked += self._machine.words()
        return True if self._asked else None

    def work(self, wanted: Callable[[int], bool]) -> Iterator[Any]:
        """Carry out requests for help. ``wanted(stage)``: whether the stage is still being replayed; called now and
        then.
        """
        while self._asked:
            word = self._asked.pop(0)
            if isinstance(word, Call) and wanted(word.stage):
                yield from self._begin(word)
            elif isinstance(word, Lot) and self._call is not None and word.by == self._call.by:
                yield from self._do(word, wanted)

    def leave(self) -> None:
        """Drop the helped stage, and requests that came too late."""
        self._let_go()
        self._call = None
        self._machine.words()
        self._asked.clear()
        self._kept.clear()

    def _let_go(self) -> None:
        if self._work is not None:
            self._work.logs.close()
        self._stage = self._work = None

    def _begin(self, call: Call) -> Iterator[Any]:
        self._let_go()
        self._call = call
        try:
            stage = self._stage = yield from self._machine.make_stage(call)
            self._work = StageWork(stage, stage.store, self._shape, self._splits, self._keep)
        except (CantHelp, CantReplay) as error:
            self._let_go()
            self._answer(call, str(error))
        else:
            self._answer(call)

    def _keep(self, datum: Datum, value: Any) -> None:
        self._kept.append((datum, value))

    def _do(self, lot: Lot, wanted: Callable[[int], bool]) -> Iterator[Any]:
        call, stage, work = self._call, self._stage, self._work
        if call is None or stage is None or work is None:
            return
        try:
            share = yield from self._share(stage, work, lot, lambda: wanted(call.stage))
        except (CantHelp, CantReplay) as error:
            self._let_go()
            self._answer(call, str(error))
        else:
            if share is not None:
                self._machine.tell(call.address, share)

    def _share(self, stage: HelpedStage, work: StageWork, lot: Lot, wanted: Callable[[], bool]) -> Waits[Share | None]:
        """Compute the share of ``lot``; the value is None if it is no longer ``wanted``."""
        self._kept = []
        if not self._members.keys() >= set(lot.blocks):
            raise CantHelp("its steps are divided into other blocks")
        stage.begin(lot.step, lot.weights)
        for block in lot.blocks:
            for micro_batch in self._members[block]:
                if not wanted():
                    return None
                yield from work.run(lot.step, (micro_batch,))
        return Share(self._worker, lot.by, lot.number, stage.sums(lot.step, lot.blocks), tuple(self._kept))

    @property
    def _worker(self) -> WorkerId:
        return self._machine.control_view.worker

    def _answer(self, call: Call, why: str = "") -> None:
        self._machine.tell(call.address, Answer(self._worker, call.by, why))
