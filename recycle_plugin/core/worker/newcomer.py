"""A newcomer, from its script's first step to the step from which it is a member.

Its script runs from the top. In steps that are over the newcomer computes nothing: a call for a step returns its
recorded loss at once. Once the script has reached the job's present step, the newcomer copies its state
(core/worker/catching_up.py). From then on each call returns when the step is committed by the others and applied here.
Only then does the newcomer ask to take part. It enters a generation that holds from a later step. From that step on it
runs programs like all members (core/worker/training_loop.py), at first without work of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from recycle_plugin.core.messages.from_coordinator import Generation, Replay
from recycle_plugin.core.messages.from_workers import CatchUp, CaughtUp, Note, Serving, Unreplayable
from recycle_plugin.core.vocabulary.barrier import Barrier
from recycle_plugin.core.vocabulary.describe import named
from recycle_plugin.core.vocabulary.iterator_draws import Place
from recycle_plugin.core.worker.catching_up import CatchingUp, Inlet
from recycle_plugin.core.worker.control_view import JobEnded
from recycle_plugin.core.worker.executor import Interrupted, Waits
from recycle_plugin.core.worker.filled_stage import FilledStage
from recycle_plugin.core.worker.loop_ports import DataEnded
from recycle_plugin.core.worker.machine import Machine
from recycle_plugin.core.worker.replay import StageReplay
from recycle_plugin.core.worker.stage_work import CantReplay
from recycle_plugin.core.worker.training_loop import TrainingLoop

PROGRESS_S = 1.0  # between two reports of its progress
BEHIND_S = 5.0  # between two reports that its script is behind the others


class HelpWanted:
    """The worker that replays this newcomer's stage wants its help."""


ASKED = HelpWanted()


class Newcomer:
    """The worker of ``loop`` before it is a member.

    ``open_line``: opens the line to a source, given its Serving. ``skip(place, enters)``: reads its plain iterator up
    to a place, before it enters and as it ``enters``. ``wants_script()``: whether its script asks a peer's for what is
    theirs alone; ``handed`` is that, once it is a member, b"" if the peer went before. ``replay``: replays the stage if
    nobody has it, in a job that logs. ``from_top``: its script goes through all steps, not from where the others are.
    """

    def __init__(
        self,
        port: Machine,
        loop: TrainingLoop,
        state: FilledStage,
        open_line: Callable[[Serving], Inlet],
        skip: Callable[[Place, bool], None] = lambda place, enters: None,
        wants_script: Callable[[], bool] = lambda: False,
        replay: StageReplay | None = None,
        from_top: bool = True,
    ) -> None:
        self._port, self._view, self._loop, self._open = port, port.control_view, loop, open_line
        self.asked = 0  # how often it has asked for the state
        self._said = False  # whether it has reported that the state is here
        self._renewed = 0  # ``CatchingUp.renewed`` at that report
        self._hash_at: set[int] = set()  # the steps after which the coordinator wants the state's hash
        self._heard = 0  # messages of stages that are replayed
        self._position = 0  # the last step that the script has gone through, or is at
        self._passed: tuple[Barrier, ...] = ()  # barriers behind the last step that was replayed
        self._called_off = -1  # the last generation without this worker that it has said to have passed over
        self._entered = False  # it is a member; its script may still have to hear that the data had ended
        self._skip = skip
        self._wants_script, self._from_top = wants_script, from_top
        self._catching_up, self._replay = CatchingUp(state, wants_script), replay
        self._behind: tuple[float, int, int] | None = None  # when the last report was made, its step, and the others'
        self._progress: tuple[float, int] | None = None  # when the last report was made, and the bytes by then
        self.handed = b""

    @property
    def catching_up(self) -> CatchingUp:
        return self._catching_up

    def start(self) -> Iterator[Any]:
        """Return when the newcomer knows where the job is. Raises JobEnded."""
        yield from self._port.wait("the job's present step", lambda: self._view.present or None, interruptible=False)

    def train(self, step: int) -> Waits[bool]:
        """Yield until ``step`` is committed by the others, and applied here if need be: True. False if the worker is a
        member from this step on. Raises JobEnded, and DataEnded if the others' data had ended before the step.
        """
        self._check_data(step)
        if self._entered:
            return False
        self._position = step
        if not self.asked and step < self._view.committed:
            self._tell_behind(step)
            return True  # not for the last step: the script may end behind that, with a state that it does not have
        if not self.asked:
            self._ask()
        what = f"the state of stage {self._loop.seat.stage} from its peers, for step {step}"
        while True:
            followed = yield from self._port.wait(what, lambda: self._followed(step), interruptible=False)
            if followed is True:
                return True
            if isinstance(followed, Replay):
                yield from self._run_replay(followed)
            elif isinstance(followed, HelpWanted):
                yield from self._loop.help()
            if isinstance(followed, Generation) and (yield from self._enter(followed)):
                if self._wants_script() and self.replayed is None:
                    yield from self._await_script(followed)
                if not self._from_top:
                    yield from self._await_changes()
                self._catching_up.close()
                self._entered = True
                self._check_data(step)  # the others may have heard so after this worker had reported
                return False

    def meets(self, barrier: Barrier) -> Waits[bool]:
        """Return whether others may wait for this worker at ``barrier``; then it is a member now. Raises JobEnded."""
        if self.replayed is None or self.replayed != self._position or barrier in self._passed:
            return False
        what = f"a generation with stage {self._loop.seat.stage}, which the others wait for"
        while True:
            generation = yield from self._port.wait(what, self._view.interruption, interruptible=False)
            if (yield from self._enter(generation)):
                return True

    @property
    def enters(self) -> bool:
        """Whether the script's next step is, as far as known, the first that it trains itself. Then its changes before
        that step count like those of the others' scripts, which wait for it.
        """
        planned = self._view.pending
        return planned is not None and planned.from_step == self._position + 1 and self.clock == self._position

    @property
    def clock(self) -> int | None:
        """The step after which the whole state is here; None while it is not."""
        if self.replayed is not None:
            return self.replayed
        return self._catching_up.clock if self._catching_up.whole else None

    @property
    def replayed(self) -> int | None:
        """The step up to which this worker has replayed its stage; None if it has not."""
        return None if self._replay is None else self._replay.clock

    def _run_replay(self, replay: Replay) -> Iterator[Any]:
        assert self._replay is not None, "a job that does not log has nothing to replay"
        self._passed = replay.passed
        self._loop.stop_helping()
        self._catching_up.close()
        try:
            if self._wants_script():
                raise CantReplay("what its script hands over by on_join was lost with the stage's last worker")
            took = yield from self._replay.run(replay)
        except CantReplay as error:
            self._port.send(Unreplayable(self._view.rank, str(error), error.stage, error.checkpoint))
        else:
            self._view.asks_in = True
            self._port.send(CaughtUp(self._view.rank, replay.committed, took.bytes, 0, took.helpers))
            if self._view.place is not None:
                self._skip(self._view.place, False)

    def _await_script(self, generation: Generation) -> Iterator[Any]:
        """Wait for the ``on_join`` value of a peer's script: the first worker of the stage that was a member before."""
        peers, before = generation.roster.peers(self._loop.seat.stage, self._view.shard), self._view.others
        known = self._catching_up.sources if before is None else before.workers
        giver = next((each for each in peers if each.worker in known), peers[0])
        self.handed = yield from self._port.wait(
            f"what the script of {giver} hands over by on_join",
            lambda: self._catching_up.handed(giver.worker),
            interruptible=False,
        )

    def _await_changes(self) -> Iterator[Any]:
        """Wait for the changes that the others' scripts have made after the last step, where this worker's script
        begins. Sources that are no longer members don't reach that step. If all sources are lost the changes are lost
        too: warn.
        """
        catching_up, clock = self._catching_up, self._catching_up.clock or 0
        changed = f"what the other scripts of stage {self._loop.seat.stage} have changed since step {clock}"
        came: bool | None = None
        while came is None:
            catching_up.keep_only(self._view.roster.workers)
            try:
                came = yield from self._port.wait(changed, catching_up.take_changes)
            except Interrupted:
                yield from self._loop.recover()
        if not came and self.replayed is None:
            who = named(self._view.rank, self._loop.seat)
            text = f"{who} has no source left for {changed}, such as rates: it goes on with the state after that step"
            self._port.send(Note(self._view.rank, "warning", text, {"seat": str(self._loop.seat), "step": clock}))

    def _enter(self, generation: Generation) -> Waits[bool]:
        """Enter the generation; return whether it is in force here, not replaced by one without this worker."""
        if self.replayed is None and self._view.place is not None:
            self._skip(self._view.place, True)
        if self._view.reported_first is None:
            self._view.reported_first = generation.number
        self._loop.pass_over(generation.number)  # others of its seat may be taking up one that it has reported for
        yield from self._loop.enter(generation)
        return self._view.generation is generation

    def _check_data(self, step: int) -> None:
        if self._view.hears_end(step):
            raise DataEnded(step)

    def _followed(self, step: int) -> bool | Generation | Replay | HelpWanted | None:
        """Return what the newcomer has to do next: a Replay of its stage, if nobody else has the state; ASKED if the
        worker that replays it wants help; True once ``step`` is followed; the generation to enter before ``step``; else
        False if it has come closer, None if nothing has come.

        So a wait's deadline is one for the next piece, and not for a whole state, which may be large and the rate low.
        """
        if (replay := self._view.take_replay()) is not None:
            return replay
        self._check_data(step)
        if self.replayed is not None:
            return True if self.replayed >= step else self._view.interruption()
        if self._view.replayed > self._heard:
            self._heard = self._view.replayed
            return False
        if self._loop.asked_to_help():
            return ASKED
        renewed = self._catching_up.renewed
        if self._view.called_off > self._called_off:
            self._called_off, self._view.reported_first = self._view.called_off, None
            self._loop.pass_over(self._called_off)
        if self._view.others is not None:
            self._catching_up.keep_only(self._view.others.workers)
        for serving in self._view.take_sources():
            self._loop.stop_helping()
            if serving.number >= self.asked:  # else its line may be closed by now: another one comes
                self._catching_up.add_source(serving.worker, self._open(serving))
        closer = self._follow()
        # also if only the lines to live sources broke
        if self._catching_up.deserted and self._catching_up.renewed > renewed:
            self._ask()
        self._said &= self._renewed == self._catching_up.renewed
        clock, end, planned = self._catching_up.clock, self._view.end, self._view.pending
        if end is not None and end.step and self._view.committed >= end.step - 1:
            raise JobEnded(end.reason, end.failed, end.code)
        if not self._catching_up.whole:
            self._tell_progress()
            return False if closer else None
        if clock is not None and clock >= step:
            return True
        if planned is not None and self._said and (not planned.from_step or clock == planned.from_step - 1 == step - 1):
            return planned  # one that holds at once has replaced one that this worker has reported for
        if not self._said:
            self._said, self._renewed = True, self._catching_up.renewed
            if self._view.place is not None:
                self._skip(self._view.place, False)
            taken, followed = self._catching_up.taken, self._catching_up.followed
            sources = tuple(sorted(self._catching_up.sources))
            self._view.asks_in = True
            self._port.send(CaughtUp(self._view.rank, clock or 0, taken, followed, sources=sources))
        return False if closer else None

    def _ask(self) -> None:
        self.asked += 1
        self._port.send(CatchUp(self._view.rank, self.asked))

    def _follow(self) -> bool:
        """Handle received parts of the state, and apply committed steps; return whether anything has changed. The
        newcomer never passes the coordinator's last commit, so a request to hash the state after a step comes in time.
        If a part of the state comes too late for that hash, the newcomer asks for another hash.
        """
        catching_up, changed = self._catching_up, False
        while True:
            self._hash_at |= self._view.take_hashes()
            until = min([self._view.committed, *(step for step in self._hash_at if step >= (catching_up.clock or 0))])
            changed |= catching_up.pump(until)
            clock = catching_up.clock
            if clock is None or clock not in self._hash_at:
                return changed
            if not catching_up.hash_after(clock):
                if not catching_up.passed:
                    return changed
                self._said = False
            self._hash_at = {step for step in self._hash_at if step > clock}

    def _tell_behind(self, step: int) -> None:
        """Report at intervals how far the script is behind the others, and what it could skip to reach them."""
        now, committed = self._port.clock(), self._view.committed
        at, before, others = self._behind or (now, step, committed)
        if self._behind is None or now - at >= BEHIND_S:
            self._behind = now, step, committed
        if now - at < BEHIND_S:
            return
        gains, left = (step - before - (committed - others)) / (now - at), committed - step
        when = f"catches up in {left / gains:.0f} s" if gains > 0 else "never catches up"
        text = (
            f"the script of {named(self._view.rank, self._loop.seat)} is at step {step}, {left} behind the others, and "
            f"at this rate {when}: let it skip work outside its steps while engine.behind, or call "
            "engine.skip_to_present() before each step of a loop that goes by engine.global_steps"
        )
        details = {"seat": str(self._loop.seat), "step": step, "left": left, "gains_per_s": round(gains, 3)}
        self._port.send(Note(self._view.rank, "behind", text, details))

    def _tell_progress(self) -> None:
        """Report at intervals how much of the state has come."""
        now, taken, share = self._port.clock(), self._catching_up.taken, self._catching_up.progress
        if self._progress is None:
            self._progress = now, taken
        at, before = self._progress
        if now - at < PROGRESS_S:
            return
        self._progress, rate = (now, taken), (taken - before) / (now - at)
        who = named(self._view.rank, self._loop.seat)
        text = f"{who} has {share:.0%} of its stage's state, {taken / 1e6:.1f} MB have come, {rate / 1e6:.1f} MB/s"
        details = {"seat": str(self._loop.seat), "share": share, "bytes": taken, "bytes_per_s": rate}
        self._port.send(Note(self._view.rank, "catching_up", text, details))
