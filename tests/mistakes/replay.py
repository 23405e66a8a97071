"""Mistakes about stages that are replayed from logs, as tests/mistakes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from recycle_plugin.core.coordinator import replays
from recycle_plugin.core.coordinator.facts.attendance import Attendance
from recycle_plugin.core.coordinator.facts.log_places import LogPlaces
from recycle_plugin.core.coordinator.facts.logs import Logs
from recycle_plugin.core.coordinator.facts.step_ledger import StepLedger
from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.vocabulary.instruction import Op
from recycle_plugin.core.vocabulary.topology import ClusterView
from recycle_plugin.core.worker.companion import Companion
from recycle_plugin.core.worker.newcomer import Newcomer
from recycle_plugin.core.worker.replay import StageReplay
from recycle_plugin.core.worker.shared_replay import Helpers
from recycle_plugin.core.worker.stage_work import StepEnd
from recycle_plugin.core.worker.step_log import CountsFrom, StepLog
from recycle_plugin.core.worker.worker import Worker
from recycle_plugin.lab.simulator.helped_stage import SimulatedHelpedStage
from recycle_plugin.lab.simulator.script import SimulatedFiles
from recycle_plugin.lab.simulator.simulated_log import SimulatedLogs
from recycle_plugin.lab.simulator.simulated_worker import SimulatedMachine
from tests.mistakes import around, changed, instead, mistake

instead("what was made in a rejected attempt is replayed", CountsFrom, "of", seen=448)(lambda self, step: 0)


@around("a log goes at a checkpoint that is not durable", SimulatedFiles, "write", seen=6)
def not_durable(self, before, number):
    if self.machine.cluster.scenario.logs:
        self.machine.cluster.logs[-1].checkpointed(self.step)
    return (yield from before(self, number))


@instead("a stage's own sum is taken for that over the tie", StepEnd, "await_inputs", seen=61)
def untied(self, seat, instruction):
    yield from ()
    if instruction.op is Op.TIE:
        self._tied = self._store[Datum("reduced", seat.stage, None, instruction.step)]


@around("steps are replayed without regard to their norm", SimulatedLogs, "record", seen=6)
def without_norm(self, before, step):
    found = before(self, step)
    return found and replace(found, norm=None)


@around("a step is replayed twice", StageReplay, "_step", seen=6)
def twice(self, before, work, record, times):
    yield from before(self, work, record, times)
    if record.step == 2:
        after = self._store[Datum("params", self._stage, None, 3)]
        self._steps.stepped = self._steps.committed = 1
        self._store.rewind(1, self._store.valid_from)
        self._store.put(Datum("params", self._stage, None, 2), after)
        yield from before(self, work, record, times)


@around("a step is not replayed", StageReplay, "_step", seen=6)
def too_few(self, before, work, record, times):
    as_before = self._store[Datum("params", self._stage, None, record.step)]
    yield from before(self, work, record, times)
    if record.step == 2:
        self._store.put(Datum("params", self._stage, None, 3), as_before)


around("who has replayed its stage takes what was computed with rejected weights", StageReplay, "run", seen=347)(
    lambda self, before, replay: before(self, replace(replay, valid_from=0))
)
instead("who comes into the middle of a step is not told what all were told of it", StepLedger, "tell_again", seen=147)(
    lambda self, worker, out: None
)
instead("what a failure has made again is not logged", Worker, "_tell_made", seen=169)(lambda self, instruction: None)


@mistake("a stage is let in before all empty stages have somebody", seen=51)
def let_in(monkeypatch) -> None:
    before = replays._let_in

    def at_once(*given):
        with pytest.MonkeyPatch.context() as for_now:
            for_now.setattr(Attendance, "view", lambda self, roster: NothingEmpty())
            before(*given)

    class NothingEmpty(ClusterView):
        def __init__(self) -> None:
            pass

        def empty_stages(self) -> tuple[int, ...]:
            return ()

    monkeypatch.setattr(replays, "_let_in", at_once)


@around("what an optimizer keeps is not restored", SimulatedMachine, "restore", seen=61)
def moments(self, before, replay):
    size = yield from before(self, replay)
    self.numbers.moments = dict.fromkeys(self.numbers.moments, 0)
    return size


instead("what a lost worker had not on its disk is taken to be there", Logs, "lost", seen=333)(
    lambda self, member: None
)
instead("nobody hears that a log has broken off", Logs, "broken", seen=1275)(lambda self, message, stage: None)
instead("logs that were on a lost host's disk are taken to be there", Logs, "gone", seen=123)(lambda self, ended: None)
instead("nobody replays along where logs go while a stage is replayed", replays, "_see_along", seen=902)(
    lambda state: None
)


@around("a folder that others see too goes with a host", LogPlaces, "ready", seen=57)
def not_shared(self, before, message, out):
    """Each process is taken to be the only one that sees its folder."""

    token = message.logged_in and replace(message.logged_in, token=str(message.worker))
    before(self, replace(message, logged_in=token), out)


@instead("who has replayed its stage does not go to where the others wait", Newcomer, "meets", seen=129)
def elsewhere(self, place):
    yield from ()
    return False


around("who has replayed its stage waits where the others have been", Newcomer, "_run_replay", seen=147)(
    lambda self, before, replay: before(self, replace(replay, passed=()))
)


@around("what a helper has made is counted beside what is made in its place", Helpers, "_collect", seen=2483)
def counted_twice(self, before, step, until):
    """Where one helper is lost, all that was dealt is dealt again, and what the others had made counts too."""

    blocks = yield from before(self, step, until)
    made = [block for lot, _ in self._shares.values() for block in lot.blocks]
    return blocks and sorted(blocks + made)


@mistake("what a newcomer has made that waits is counted beside what others make of it", seen=168)
def counted_beside(monkeypatch) -> None:
    """It has no part in the job yet, and its blocks are dealt as if nobody had them."""

    def collect(self, before, step, until):
        blocks = yield from before(self, step, until)
        dealt = {number for number, (_, share) in self._shares.items() if share.by in self._beside}
        again = [block for number in dealt - self.counted for block in self._shares[number][0].blocks]
        self.counted |= dealt
        return sorted(blocks + again)

    monkeypatch.setattr(Helpers, "counted", set(), raising=False)
    changed(monkeypatch, Helpers, "_collect", collect)


@around(
    "a newcomer that waits helps with the weights that its script has made", SimulatedHelpedStage, "begin", seen=168
)
def own_weights(self, before, step, weights):
    own = self._machine.store[Datum("params", self._machine.seat.stage, None, 1)]
    before(self, step, weights._replace(weight=own) if self._machine.control_view.outside else weights)


@around("helpers compute with the weights of their first step", SimulatedHelpedStage, "begin", seen=123)
def stale(self, before, step, weights):
    self.first = getattr(self, "first", weights)
    before(self, step, self.first)


@around("a helper makes the stage in its own place", SimulatedHelpedStage, "begin", seen=123)
def in_its_own_place(self, before, step, weights):
    """Its moments are those that the helped stage has left, and not put back."""

    before(self, step, weights)
    self._machine.numbers.moments = dict.fromkeys(self._machine.numbers.moments, step)


@mistake("a step is replayed with what the script has set for another one", seen=302)
def scripted(monkeypatch) -> None:
    class Unset:
        def __init__(self, machine) -> None:
            self._machine = machine

        def __getattr__(self, name):
            return getattr(self._machine, name)

        def set_for(self, step) -> None:
            pass

    def run(self, before, replay):
        self._machine = Unset(self._machine)
        return (yield from before(self, replay))

    changed(monkeypatch, StageReplay, "run", run)


instead("nobody replays along where a boundary is not logged", Logs, "along", seen=67)(lambda self, committed, lost: {})


@around("stages that replay together log no more than they are told to", StepLog, "kept", seen=67)
def told_only(self, before, datum, value, valid_from):
    self._all = False
    before(self, datum, value, valid_from)


@around("who has replayed along keeps what its optimizer had at the checkpoint", SimulatedMachine, "put_back", seen=129)
def not_put_back(self, before, kept):
    (state, rate), (_, moments) = kept, self.cluster.saved[min(self.cluster.saved, key=lambda each: each[0])]
    before(self, (state._replace(moments=dict(moments)), rate))


@around("what a companion had begun of a step counts beside what is made again", Companion, "run", seen=302)
def begun(self, before, replay):
    kept = dict(self._machine.numbers._sums)
    yield from before(self, replay)
    self._machine.numbers._sums |= {key: value for key, value in kept.items() if key[0] > replay.committed}
