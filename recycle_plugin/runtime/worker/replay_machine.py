"""The machine by which a real worker replays its stage from all workers' logs (core/worker/replay.py)."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import torch

from recycle_plugin import folders
from recycle_plugin.core.messages.activity import ELSEWHERE, WAITS
from recycle_plugin.core.messages.from_coordinator import LogsAt, Replay
from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.vocabulary.instruction import Instruction
from recycle_plugin.core.worker.control_view import ControlView
from recycle_plugin.core.worker.executor import Waits
from recycle_plugin.core.worker.shares import Word
from recycle_plugin.core.worker.stage_work import CantReplay
from recycle_plugin.core.worker.step_store import StepStore
from recycle_plugin.errors import NotSaved, RecycleError
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.devices.port import COPY_S, Copy, Tensors
from recycle_plugin.runtime.log.served import token_of
from recycle_plugin.runtime.movers.shares import SentWeights, Sums
from recycle_plugin.runtime.state.surroundings import SetByScript, layers_digest
from recycle_plugin.runtime.worker.job_log import JobLogs
from recycle_plugin.runtime.worker.log_mirror import Mirror, mirror_in
from recycle_plugin.runtime.worker.parts import Parts

T = TypeVar("T")
LOOK_S = 0.05  # seconds between two looks at the logs
MADE_S = 30.0  # seconds in which data made before the loss gets into a log: its writers write everything at that point
DRIFT = 1e-2  # of the largest number: a replay's tolerated difference if sums have no order
DRIFTS = {1: 0.3, 2: 1e-1}  # in short types, by their bytes


class LoggedWork:
    """The part of a worker of ``session`` that uses the logs in ``folder`` and ``elsewhere``."""

    def __init__(self, session: Session, folder: Path, elsewhere: Collection[LogsAt] = ()) -> None:
        self.session, self.folder, self.elsewhere = session, folder, elsewhere
        self._mirror: Mirror | None = None

    def logs(self) -> JobLogs:
        """Return the logs of all workers of the job. Raises CantReplay if there is no room for those from elsewhere."""
        session = self.session
        try:
            own = token_of(self.folder, session.job_id)
            if others := [each for each in self.elsewhere if each.token != own]:
                self._mirror = Mirror(
                    mirror_in(self.folder, session.rank), session.job_id, others, session.secret, LOOK_S
                )
        except NotSaved as error:
            raise CantReplay(f"other workers' logs can't be fetched: {error}") from error
        return JobLogs(self.folder, session.job_id, LOOK_S, self._mirror)

    def wait_logged(self, what: str, ready: Callable[[], T | None], made: bool) -> Waits[T]:
        """Block until ``ready()`` is not None, and return it; never yields. ``made``: it was made long ago, so it has
        to come within MADE_S, counted from the last arrival from other hosts. Raises JobEnded, or CantReplay if it does
        not come.
        """
        session = self.session
        until = time.monotonic() + (MADE_S if made else max(session.waiting.timeout_s, session.view.expected.limit_s))
        with session.heartbeats.at(WAITS, what):
            while (value := ready()) is None:
                with session.waiting.changed:
                    session.view.check_end()
                    if time.monotonic() >= max(until, self._moved() + MADE_S):
                        raise CantReplay(f"{what} is in no log in {self.folder}")
                    session.waiting.changed.wait(LOOK_S)
        return value
        yield

    def _moved(self) -> float:
        return 0.0 if self._mirror is None else self._mirror.moved

    def spend(self, instruction: Instruction) -> Iterator[Any]:
        """Do nothing: a real worker's instruction takes its time by itself."""
        return iter(())


class ReplayMachine(LoggedWork):
    """The machine of a newcomer that replays its stage with ``parts``, whose log knows where all logs are. ``apart()``:
    a context for what its script does not do over again. ``scripted``: what the script has set for its steps.
    ``alone``: why nobody can help, in words, "" if others can.
    """

    def __init__(
        self, parts: Parts, apart: Callable[[], AbstractContextManager[object]], scripted: SetByScript, alone: str
    ) -> None:
        assert parts.log is not None, "a job that does not log replays nothing"
        super().__init__(parts.session, parts.log.folder)
        self._parts, self._left_out, self.scripted, self._alone = parts, apart, scripted, alone
        self.framework, self.state, self.operations = parts.framework, parts.state, parts.operations
        self.address = parts.transport.address

    def clock(self) -> float:
        """The time in seconds of a monotonic clock."""
        return time.monotonic()

    def words(self) -> list[Word]:
        """Return the words on its replay that have come since the last call."""
        return self._parts.world.words()

    def tell(self, address: str, word: Word) -> None:
        """Send a word on its replay to the worker at ``address``, which may be gone."""
        self._parts.world.tell(address, word)

    @property
    def control_view(self) -> ControlView:
        return self.session.view

    def send(self, message: object) -> None:
        """Send ``message`` to the coordinator."""
        self.session.send(message)

    def wait_share(self, what: str, until: float) -> Iterator[Any]:
        """Block until a word for this worker is here, at most LOOK_S or to ``until``; never yields. Raises JobEnded."""
        session = self.session
        with session.heartbeats.at(WAITS, what), session.waiting.changed:
            session.view.check_end()
            if not self._parts.world.has_words:
                session.waiting.changed.wait(max(0.0, min(LOOK_S, until - self.clock())))
        return iter(())

    def weights(self) -> SentWeights:
        """Return the present weights of this worker's stage."""
        model = self.framework.model
        tensors = (*model.module.parameters(), *model.module.buffers())
        there = model.device.to_host(tensors, "the weights of a replayed stage", shared=True).wait(COPY_S)
        return SentWeights(there, self._parts.stage.loss_scale, layers_digest(model.module))

    def add_share(self, step: int, sums: Sums) -> None:
        """Add a share's sums to this worker's own."""
        self._parts.contributions.add(sums)

    def why_alone(self) -> str:
        """Return why no other worker can compute this stage, in words; "" if others can."""
        return self._alone

    def restore(self, replay: Replay) -> Waits[int]:
        """Load this worker's stage state from a checkpoint. Returns its bytes; never yields. Raises CantReplay."""
        framework, session, began = self.framework, self.session, time.monotonic()
        self.elsewhere = replay.logs
        path, why = replay.path, ""
        try:
            with session.heartbeats.at(ELSEWHERE, "a checkpoint"), self._left_out():
                framework.checkpoints.read(self.state, Path(path))
        except Exception as error:  # may be torch's or DeepSpeed's
            why = str(error) if isinstance(error, RecycleError) else f"it {folders.unread(error)}"
        if why:
            gone = f"its checkpoint {path} was removed, and no log reaches back to an older one"
            raise CantReplay(
                f"the checkpoint {path} can't be loaded: {why}" if Path(path).is_dir() else gone, checkpoint=path
            )
        if framework.optimizer.steps != replay.step:
            raise CantReplay(
                f"the checkpoint {replay.path} is of step {framework.optimizer.steps}, and not of {replay.step}"
            )
        self.state.rewritten()
        self.scripted.rewind(replay.step)
        if framework.compute is None:
            framework.model.module.train()
        size = sum(tensor.nbytes for tensor in self.state.tensors().values())
        took = round(time.monotonic() - began, 4)
        text = f"seat {framework.seat} has the state of the checkpoint of step {replay.step}, which took {took:.2f} s"
        session.note("restored", text, seat=str(framework.seat), step=replay.step, bytes=size, seconds=took)
        return size
        yield

    def forget_sums(self, after: int) -> None:
        """Drop the weight gradients of the steps after ``after`` that were added up here."""
        self.operations.forget_sums(after)

    def set_for(self, step: int) -> None:
        """Set the script's values for ``step``."""
        self.scripted.apply(step)

    def compute(self, instruction: Instruction, have: StepStore, boundary_only: bool) -> Mapping[Datum, Any]:
        """Return the results of LOAD, F, I, W, B or STEP."""
        return self.operations.compute(instruction, have, boundary_only)

    def differs(self, made: Any, sent: Tensors) -> str:
        """Return by how much replayed boundary tensors differ from those sent, in words; "" if they do not."""
        device = self.framework.model.device
        copy: Copy = device.to_host(made, "what is replayed", shared=True) if type(made) is tuple else made
        return difference(copy.wait(COPY_S), sent, bool(self._parts.settings.exact))

    def add_up_alone(self, instruction: Instruction, have: StepStore) -> Any:
        """Return the sum of a REDUCE over the stage's contributions, which are all here."""
        return self._parts.stepping.reduce_alone(instruction.step)

    def tied_of(self, logged: Any) -> Any:
        """Return what TIE leaves here, from another stage's log: tensors in the order of the weights' names."""
        try:
            return self._parts.gradients.tied_of(logged)
        except ValueError as error:
            raise CantReplay("it shares weights with several stages, different ones with each") from error


def difference(made: Tensors, sent: Tensors, exact: bool) -> str:
    """Return by how much ``made`` differs from ``sent``, in words. "" if the finite numbers are the same; unless
    ``exact`` they may differ as far as accumulated rounding explains, as to where large ones overflow.
    """
    for one, other in zip(made, sent, strict=True):
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return f"{one.dtype} of {tuple(one.shape)} where it was {other.dtype} of {tuple(other.shape)}"
        if torch.equal(one, other):
            continue
        if not (one.is_floating_point() or one.is_complex()):
            return "other whole numbers"
        size, most = one.dtype.itemsize, torch.finfo(one.dtype).max
        if size == 1:  # torch does not compute in these
            one, other = one.float(), other.float()
        here, there = one.isfinite(), other.isfinite()
        ours, theirs = one[here & there], other[here & there]
        apart = (ours - theirs).abs().max().item() if len(ours) else 0.0
        largest = other[there].abs().max().item() if there.any() else 0.0
        drift = 0.0 if exact else DRIFTS.get(size, DRIFT)
        overflows = not exact and (not there.all() or largest > (1 - drift) * most)
        if not overflows and not torch.equal(here, there):
            return "it has numbers that are not finite where it had others"
        if apart > drift * largest:
            return f"it differs by {apart:.3g}, and the largest number is {largest:.3g}"
    return ""
