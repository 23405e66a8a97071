"""Mistakes about stages that are replayed from logs, as tests/mistakes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from recycle_plugin.core.coordinator import replays
from recycle_plugin.core.coordinator.attendance import Attendance
from recycle_plugin.core.coordinator.log_places import LogPlaces
from recycle_plugin.core.coordinator.logs import Logs
from recycle_plugin.core.coordinator.step_ledger import StepLedger
from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.vocabulary.instruction import Op
from recycle_plugin.core.vocabulary.topology import ClusterView
from recycle_plugin.core.worker.companion import Companion
from recycle_plugin.core.worker.newcomer import Newcomer
from recycle_plugin.core.worker.replay import StageReplay, StepEnd
from recycle_plugin.core.worker.shared_replay import Helpers
from recycle_plugin.core.worker.step_log import CountsFrom, StepLog
from recycle_plugin.core.worker.worker import Worker
from recycle_plugin.lab.simulator.helped_stage import HelpedStage
from recycle_plugin.lab.simulator.script import SimulatedFiles
from recycle_plugin.lab.simulator.simulated_log import SimulatedLogs
from recycle_plugin.lab.simulator.simulated_worker import SimulatedMachine
from tests.mistakes import changed, mistake


@mistake("what was made in a rejected attempt is replayed", seen=448)
def rejected(monkeypatch) -> None:
    monkeypatch.setattr(CountsFrom, "of", lambda self, step: 0)


@mistake("a log goes at a checkpoint that is not durable", seen=6)
def not_durable(monkeypatch) -> None:
    def write(self, before, number):
        if self.machine.cluster.scenario.logs:
            self.machine.cluster.logs[-1].checkpointed(self.step)
        return (yield from before(self, number))

    changed(monkeypatch, SimulatedFiles, "write", write)


@mistake("a stage's own sum is taken for that over the tie", seen=61)
def untied(monkeypatch) -> None:
    def await_inputs(self, seat, instruction):
        yield from ()
        if instruction.op is Op.TIE:
            self._tied = self._store[Datum("reduced", seat.stage, None, instruction.step)]

    monkeypatch.setattr(StepEnd, "await_inputs", await_inputs)


@mistake("steps are replayed without regard to their norm", seen=6)
def without_norm(monkeypatch) -> None:
    def record(self, before, step):
        found = before(self, step)
        return found and replace(found, norm=None)

    changed(monkeypatch, SimulatedLogs, "record", record)


@mistake("a step is replayed twice", seen=6)
def twice(monkeypatch) -> None:
    def step(self, before, work, record, times):
        yield from before(self, work, record, times)
        if record.step == 2:
            after = self._store[Datum("params", self._stage, None, 3)]
            self._steps.stepped = self._steps.committed = 1
            self._store.rewind(1, self._store.valid_from)
            self._store.put(Datum("params", self._stage, None, 2), after)
            yield from before(self, work, record, times)

    changed(monkeypatch, StageReplay, "_step", step)


@mistake("a step is not replayed", seen=6)
def too_few(monkeypatch) -> None:
    def step(self, before, work, record, times):
        as_before = self._store[Datum("params", self._stage, None, record.step)]
        yield from before(self, work, record, times)
        if record.step == 2:
            self._store.put(Datum("params", self._stage, None, 3), as_before)

    changed(monkeypatch, StageReplay, "_step", step)


@mistake("who has replayed its stage takes what was computed with rejected weights", seen=347)
def valid_from(monkeypatch) -> None:
    changed(monkeypatch, StageReplay, "run", lambda self, before, replay: before(self, replace(replay, valid_from=0)))


@mistake("who comes into the middle of a step is not told what all were told of it", seen=147)
def not_told(monkeypatch) -> None:
    monkeypatch.setattr(StepLedger, "tell_again", lambda self, worker, out: None)


@mistake("what a failure has made again is not logged", seen=169)
def not_kept(monkeypatch) -> None:
    monkeypatch.setattr(Worker, "_keep", lambda self, instruction, log: None)


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


@mistake("what an optimizer keeps is not restored", seen=61)
def moments(monkeypatch) -> None:
    def restore(self, before, replay):
        size = yield from before(self, replay)
        self.numbers.moments = dict.fromkeys(self.numbers.moments, 0)
        return size

    changed(monkeypatch, SimulatedMachine, "restore", restore)


@mistake("what a lost worker had not on its disk is taken to be there", seen=333)
def tail(monkeypatch) -> None:
    monkeypatch.setattr(Logs, "lost", lambda self, member: None)


@mistake("nobody hears that a log has broken off", seen=1275)
def broken_off(monkeypatch) -> None:
    monkeypatch.setattr(Logs, "broken", lambda self, message, stage: None)


@mistake("logs that were on a lost host's disk are taken to be there", seen=123)
def gone(monkeypatch) -> None:
    monkeypatch.setattr(Logs, "gone", lambda self, ended: None)


@mistake("nobody replays along where logs go while a stage is replayed", seen=902)
def not_along_later(monkeypatch) -> None:
    monkeypatch.setattr(replays, "_see_along", lambda course, now, out: None)


@mistake("a folder that others see too goes with a host", seen=57)
def not_shared(monkeypatch) -> None:
    """Each process is taken to be the only one that sees its folder."""

    def ready(self, before, message, out):
        token = message.logged_in and replace(message.logged_in, token=str(message.worker))
        before(self, replace(message, logged_in=token), out)

    changed(monkeypatch, LogPlaces, "ready", ready)


@mistake("who has replayed its stage does not go to where the others wait", seen=129)
def elsewhere(monkeypatch) -> None:
    def meets(self, place):
        yield from ()
        return False

    monkeypatch.setattr(Newcomer, "meets", meets)


@mistake("who has replayed its stage waits where the others have been", seen=147)
def has_been(monkeypatch) -> None:
    changed(
        monkeypatch,
        Newcomer,
        "_run_replay",
        lambda self, before, replay: before(self, replace(replay, passed=())),
    )


@mistake("what a helper has made is counted beside what is made in its place", seen=2483)
def counted_twice(monkeypatch) -> None:
    """Where one helper is lost, all that was dealt is dealt again, and what the others had made counts too."""

    def collect(self, before, step, until):
        blocks = yield from before(self, step, until)
        made = [block for lot, _ in self._shares.values() for block in lot.blocks]
        return blocks and sorted(blocks + made)

    changed(monkeypatch, Helpers, "_collect", collect)


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


@mistake("a newcomer that waits helps with the weights that its script has made", seen=168)
def own_weights(monkeypatch) -> None:
    def begin(self, before, step, weights):
        own = self._machine.store[Datum("params", self._machine.seat.stage, None, 1)]
        before(self, step, weights._replace(weight=own) if self._machine.control_view.outside else weights)

    changed(monkeypatch, HelpedStage, "begin", begin)


@mistake("helpers compute with the weights of their first step", seen=123)
def stale(monkeypatch) -> None:
    def begin(self, before, step, weights):
        self.first = getattr(self, "first", weights)
        before(self, step, self.first)

    changed(monkeypatch, HelpedStage, "begin", begin)


@mistake("a helper makes the stage in its own place", seen=123)
def in_its_own_place(monkeypatch) -> None:
    """Its moments are those that the helped stage has left, and not put back."""

    def begin(self, before, step, weights):
        before(self, step, weights)
        self._machine.numbers.moments = dict.fromkeys(self._machine.numbers.moments, step)

    changed(monkeypatch, HelpedStage, "begin", begin)


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


@mistake("nobody replays along where a boundary is not logged", seen=67)
def nobody_along(monkeypatch) -> None:
    monkeypatch.setattr(Logs, "along", lambda self, committed, lost: {})


@mistake("stages that replay together log no more than they are told to", seen=67)
def told_only(monkeypatch) -> None:
    changed(monkeypatch, StepLog, "keep", _as_told)


def _as_told(self, before, datum, value, valid_from):
    self._all = False
    before(self, datum, value, valid_from)


@mistake("who has replayed along keeps what its optimizer had at the checkpoint", seen=129)
def not_put_back(monkeypatch) -> None:
    def put_back(self, before, kept):
        (state, rate), (_, moments) = kept, self.cluster.saved[min(self.cluster.saved, key=lambda each: each[0])]
        before(self, (state._replace(moments=dict(moments)), rate))

    changed(monkeypatch, SimulatedMachine, "put_back", put_back)


@mistake("what a companion had begun of a step counts beside what is made again", seen=63)
def begun(monkeypatch) -> None:
    """It drops what it has, and its sums stay."""

    def run(self, before, replay):
        kept = dict(self._machine.numbers._sums)
        yield from before(self, replay)
        self._machine.numbers._sums |= {key: value for key, value in kept.items() if key[0] > replay.committed}

    changed(monkeypatch, Companion, "run", run)
