"""A real worker's log, and the machine by which it replays its stage from everybody's (core/worker/replay.py)."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from recycle_plugin import folders
from recycle_plugin.core.messages.activity import ELSEWHERE, WAITS
from recycle_plugin.core.messages.from_coordinator import LogsAt, Replay
from recycle_plugin.core.messages.from_workers import LogFolder
from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.vocabulary.instruction import Instruction
from recycle_plugin.core.vocabulary.log_boundaries import stage_hosts
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.core.worker.executor import Waits
from recycle_plugin.core.worker.replay import CantReplay
from recycle_plugin.core.worker.step_log import StepLog
from recycle_plugin.core.worker.step_store import StepStore
from recycle_plugin.errors import NotSaved, RecycleError
from recycle_plugin.planner.log_line import expected
from recycle_plugin.planner.log_selection import Line
from recycle_plugin.runtime.catch_up.listener import address_of
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.devices.port import COPY_S, Copy, Tensors
from recycle_plugin.runtime.log.records import Stream
from recycle_plugin.runtime.log.served import token_of
from recycle_plugin.runtime.movers.shares import SentWeights, Sums
from recycle_plugin.runtime.stage.gradients import Contributions
from recycle_plugin.runtime.stage.ports import Framework
from recycle_plugin.runtime.state.stage_state import StageState
from recycle_plugin.runtime.state.surroundings import SetByScript, layers_digest
from recycle_plugin.runtime.worker.job_log import JobLogs, WorkerLog
from recycle_plugin.runtime.worker.log_choice import LogChoice
from recycle_plugin.runtime.worker.log_mirror import Mirror, mirror_in
from recycle_plugin.runtime.worker.machine import TorchMachine
from recycle_plugin.runtime.worker.operations import Operations
from recycle_plugin.runtime.worker.stepping import Stepping
from recycle_plugin.settings.schema import Settings
from recycle_plugin.settings.sections import LogSettings
from recycle_plugin.settings.wording import SettingsError

T = TypeVar("T")
LOOK_S = 0.05  # between two looks at the logs
MADE_S = 30.0  # how long what was made before the loss may take to be in a log: its writers write all of it at that
UNBOUNDED = 1 << 62
DRIFT, DRIFT_OF_HALF = 1e-2, 1e-1  # of the largest number: what a replay may differ by where sums have no order
HALVES = (torch.bfloat16, torch.float16)


def _begin_in(folder: Path) -> None:
    """Make the folder of a log.  Raises SettingsError where that can't be."""
    try:
        folders.make(folder)
    except NotSaved as error:
        raise SettingsError("log.folder", str(error), "write a folder that every worker can write to") from error


class StageLog:
    """The log of the worker of ``session``, of the stage that ``framework`` has, where ``settings`` ask for one.

    ``run_dir``: the run folder; ``limit``: how many may help to replay it, None for as many as there is work for;
    ``boundaries``: which are logged, as it is set.  Raises SettingsError for a boundary that there is not.
    """

    def __init__(self, session: Session, framework: Framework, settings: LogSettings, run_dir: str) -> None:
        self.boundaries = settings.of_stages(framework.topology.stages)
        self.folder = Path(settings.folder or f"{run_dir}/log")
        _begin_in(self.folder)
        self._mirror = mirror_in(self.folder, session.rank)
        shutil.rmtree(self._mirror, ignore_errors=True)  # of a process before this one
        assert not isinstance(settings.ring_bytes, str), "a checked size is a number"
        self._stage = framework.seat.stage
        self.limit = settings.most_helpers
        stream = Stream(session.job_id, session.worker, framework.seat)
        budget = UNBOUNDED if settings.ring_bytes is None else settings.ring_bytes
        self._log = WorkerLog(session, self.folder, stream, budget, framework.model.device)
        self.steps = StepLog(self._log, range(framework.topology.stages - 1), self._log.weigh)

    def choice(
        self,
        session: Session,
        settings: Settings,
        shape: Callable[[], Topology],
        micro_batch_size: int,
        state: StageState,
    ) -> LogChoice:
        """The choice of what a job of ``shape()``, which its script may change, logs."""
        assert settings.log is not None, "the settings that have asked for this log"
        profile = settings.profile()

        def planned(every: int) -> Line | None:
            if profile is None:
                return None
            costs, batch = settings.cost_model(shape(), micro_batch_size), len(shape().batch)
            return expected(costs, profile, settings.split_backward, batch, stage_hosts(session.roster), every)

        def state_bytes() -> int:
            return sum(tensor.nbytes for tensor in state.tensors().values())

        return LogChoice(session, settings.log, self._stage, self.steps.meter, planned, state_bytes)

    def where(self, session: Session, interface: str | None) -> LogFolder:
        """The folder that it is in, as others may be told of it.  ``interface``: the setting, by which they come."""
        host = address_of(interface) if interface else session.own_address
        return LogFolder(str(self.folder.absolute()), token_of(self.folder, session.job_id), host)

    def close(self) -> None:
        """Write what is left, and end."""
        self._log.close()
        shutil.rmtree(self._mirror, ignore_errors=True)


class LoggedWork:
    """What a worker of ``session`` does by the logs in ``folder``, and by those that are ``elsewhere``."""

    def __init__(self, session: Session, folder: Path, elsewhere: Collection[LogsAt] = ()) -> None:
        self.session, self.folder, self.elsewhere = session, folder, elsewhere
        self._mirror: Mirror | None = None

    def logs(self) -> JobLogs:
        """The logs of all workers of the job.  Raises CantReplay where there is no room for those from elsewhere."""
        session = self.session
        try:
            own = token_of(self.folder, session.job_id)
            if others := [each for each in self.elsewhere if each.token != own]:
                self._mirror = Mirror(
                    mirror_in(self.folder, session.rank), session.job_id, others, session.secret, LOOK_S
                )
        except NotSaved as error:
            raise CantReplay(f"others' logs can't be had: {error}") from error
        return JobLogs(self.folder, session.job_id, LOOK_S, self._mirror)

    def wait_logged(self, what: str, ready: Callable[[], T | None], made: bool) -> Waits[T]:
        """Block until ``ready()`` is not None, and return it.  A generator that never yields.

        Raises JobEnded, and CantReplay where what is waited for does not come; what was ``made`` long ago has to come
        soon, or behind what comes from other hosts.
        """
        session = self.session
        until = time.monotonic() + (MADE_S if made else max(session.wait_timeout_s, session.expected.limit_s))
        with session.heartbeats.at(WAITS, what):
            while (value := ready()) is None:
                with session.changed:
                    session.check_end()
                    if time.monotonic() >= max(until, self._moved() + MADE_S):
                        raise CantReplay(f"{what} is in no log in {self.folder}")
                    session.changed.wait(LOOK_S)
        return value
        yield

    def _moved(self) -> float:
        return 0.0 if self._mirror is None else self._mirror.moved

    def spend(self, instruction: Instruction) -> Iterator[Any]:
        """Nothing: a real worker's instruction takes its time by itself."""
        return iter(())


@dataclass(frozen=True)
class Sharing:
    """What a replay needs that others help with: ``world``, by which it talks to them, found at ``address``;
    ``contributions``, which they add to; the ``loss_scale()``; and ``why_alone``, where nobody can help.
    """

    world: TorchMachine
    address: str
    contributions: Contributions
    loss_scale: Callable[[], float]
    why_alone: str = ""


class ReplayMachine(LoggedWork):
    """The machine of a newcomer that replays its stage, which fills ``state`` from the checkpoints of ``framework``.

    ``folder`` has the logs; ``apart()``: a context for what its script does not do over again; ``scripted``: what that
    has set for its steps; ``exact``: it gives the same bits.
    """

    def __init__(
        self,
        session: Session,
        framework: Framework,
        state: StageState,
        stepping: Stepping,
        operations: Operations,
        folder: Path,
        apart: Callable[[], AbstractContextManager],
        scripted: SetByScript,
        exact: bool,
        sharing: Sharing,
    ) -> None:
        super().__init__(session, folder)
        self.framework, self.state, self.stepping, self.operations = framework, state, stepping, operations
        self.apart, self.scripted, self._exact, self._sharing = apart, scripted, exact, sharing
        self.clock = time.monotonic
        self.address, self.words, self.tell = sharing.address, sharing.world.words, sharing.world.tell

    @property
    def control_view(self) -> Session:
        """What this worker knows of the control plane."""
        return self.session

    def send(self, message: object) -> None:
        """Send ``message`` to the coordinator."""
        self.session.send(message)

    def wait_share(self, what: str, until: float) -> Iterator[Any]:
        """Block until something was said to this worker, or for a moment.  A generator that never yields.  Raises
        JobEnded.
        """
        session = self.session
        with session.heartbeats.at(WAITS, what), session.changed:
            session.check_end()
            if not self._sharing.world.has_words:
                session.changed.wait(max(0.0, min(LOOK_S, until - self.clock())))
        return iter(())

    def weights(self) -> SentWeights:
        """The tensors of this worker's stage, as they are now."""
        model = self.framework.model
        tensors = (*model.module.parameters(), *model.module.buffers())
        there = model.device.to_host(tensors, "the weights of a replayed stage", shared=True).wait(COPY_S)
        return SentWeights(there, self._sharing.loss_scale(), layers_digest(model.module))

    def add_share(self, step: int, sums: Sums) -> None:
        """Add what a share has to this worker's own sums."""
        self._sharing.contributions.add(sums)

    def why_alone(self) -> str:
        """Why nobody else can make this worker's stage, in words; empty where others can."""
        return self._sharing.why_alone

    def restore(self, replay: Replay) -> Waits[int]:
        """Take the state of this worker's stage from a checkpoint; returns its bytes.  A generator that never yields.

        Raises CantReplay.
        """
        framework, session, began = self.framework, self.session, time.monotonic()
        self.elsewhere = replay.logs
        path, why = replay.path, ""
        try:
            with session.heartbeats.at(ELSEWHERE, "a checkpoint"), self.apart():
                framework.checkpoints.read(self.state, Path(path))
        except Exception as error:  # also of torch's or of DeepSpeed's
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
        """Set what the script has set for ``step``."""
        self.scripted.apply(step)

    def compute(self, instruction: Instruction, have: StepStore, boundary_only: bool) -> Mapping[Datum, Any]:
        """What LOAD, F, I, W, B or STEP makes."""
        return self.operations.compute(instruction, have, boundary_only)

    def differs(self, made: Any, sent: Tensors) -> str:
        """By how much boundary tensors that were made once more are others than were sent, in words; "" where they are
        the same.
        """
        device = self.framework.model.device
        copy: Copy = device.to_host(made, "what is replayed", shared=True) if type(made) is tuple else made
        return difference(copy.wait(COPY_S), sent, self._exact)

    def add_up_alone(self, instruction: Instruction, have: StepStore) -> Any:
        """The sum of a REDUCE over all contributions of the stage, which are all here."""
        return self.stepping.reduce_alone(instruction.step)

    def tied_of(self, logged: Any) -> Any:
        """What TIE leaves here, of what another stage of the tie has logged of it: tensors in the order of the
        weights' names, alike in all stages.
        """
        try:
            return self.stepping.tied_of(logged)
        except ValueError as error:
            raise CantReplay("it shares weights with several stages, each of which has others of them") from error


def difference(made: Tensors, sent: Tensors, exact: bool) -> str:
    """By how much ``made`` is something else than ``sent``, in words; "" where its finite numbers are the same, or,
    unless ``exact``, up to what roundings may have grown to.
    """
    for one, other in zip(made, sent, strict=True):
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return f"{one.dtype} of {tuple(one.shape)} where it was {other.dtype} of {tuple(other.shape)}"
        if torch.equal(one, other):
            continue
        if not (one.is_floating_point() or one.is_complex()):
            return "other whole numbers"
        finite = one.isfinite() & other.isfinite()
        ours, theirs = one[finite], other[finite]
        apart = (ours - theirs).abs().max().item() if len(ours) else 0.0
        largest = theirs.abs().max().item() if len(ours) else 0.0
        drift = 0.0 if exact else DRIFT_OF_HALF if one.dtype in HALVES else DRIFT
        if apart > drift * largest:
            return f"it differs by {apart:.3g}, and the largest number is {largest:.3g}"
    return ""
