"""A real worker's log, from which its stage can be replayed (runtime/worker/replay_machine.py)."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from recycle_plugin import folders
from recycle_plugin.core.messages.from_workers import LogFolder
from recycle_plugin.core.vocabulary.log_boundaries import stage_hosts
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.core.worker.step_log import StepLog
from recycle_plugin.errors import NotSaved
from recycle_plugin.planner.log_line import expected
from recycle_plugin.planner.log_selection import Line
from recycle_plugin.runtime.catch_up.listener import address_of
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.log.records import Stream
from recycle_plugin.runtime.log.served import token_of
from recycle_plugin.runtime.stage.ports import Framework
from recycle_plugin.runtime.state.stage_state import StageState
from recycle_plugin.runtime.worker.job_log import WorkerLog
from recycle_plugin.runtime.worker.log_choice import LogChoice
from recycle_plugin.runtime.worker.log_mirror import mirror_in
from recycle_plugin.settings.schema import Settings
from recycle_plugin.settings.sections import LogSettings
from recycle_plugin.settings.wording import SettingsError

UNBOUNDED = 1 << 62


def _begin_in(folder: Path) -> None:
    try:
        folders.make(folder)
    except NotSaved as error:
        raise SettingsError("log.folder", str(error), "write a folder that every worker can write to") from error


class StageLog:
    """The log of the worker of ``session``, for the stage that ``framework`` has; ``settings``: what is logged.
    ``run_dir``: the run folder. ``limit``: how many workers may help to replay it, None for no limit. ``boundaries``:
    those that the settings log. Raises SettingsError for a boundary that does not exist.
    """

    def __init__(self, session: Session, framework: Framework, settings: LogSettings, run_dir: str) -> None:
        self.boundaries = settings.of_stages(framework.topology.stages)
        self.folder = Path(settings.folder or f"{run_dir}/log")
        _begin_in(self.folder)
        self._mirror = mirror_in(self.folder, session.rank)
        shutil.rmtree(self._mirror, ignore_errors=True)  # left by a former process
        assert not isinstance(settings.ring_bytes, str), "a checked size is a number"
        self._stage = framework.seat.stage
        self.limit = settings.most_helpers
        stream = Stream(session.job_id, session.view.worker, framework.seat)
        budget = UNBOUNDED if settings.ring_bytes is None else settings.ring_bytes
        self._log = WorkerLog(session, self.folder, stream, budget, framework.model.device)
        self.steps = StepLog(self._log, range(framework.topology.stages - 1), self._log.weigh)

    def choice(
        self,
        session: Session,
        settings: Settings,
        shape: Callable[[], Topology],
        state: StageState,
    ) -> LogChoice:
        """Return the choice of what a job of ``shape()``, which its script may change, logs."""
        assert settings.log is not None, "the settings that have asked for this log"
        given = settings.given_costs()

        def planned(every: int) -> Line | None:
            if given is None or not given.memory:
                return None
            batch, hosts = len(shape().batch), stage_hosts(session.view.roster)
            return expected(given.costs, given.memory, settings.split_backward, batch, hosts, every)

        def state_bytes() -> int:
            return sum(tensor.nbytes for tensor in state.tensors().values())

        budget = settings.log.budget_bytes
        return LogChoice(session, self.boundaries, budget, self._stage, self.steps.meter, planned, state_bytes)

    def where(self, session: Session, interface: str | None) -> LogFolder:
        """Return where the log is, for other workers. ``interface``: the setting by which they connect."""
        host = address_of(interface) if interface else session.own_address
        return LogFolder(str(self.folder.absolute()), token_of(self.folder, session.job_id), host)

    def close(self) -> None:
        """Write the rest, and end."""
        self._log.close()
        shutil.rmtree(self._mirror, ignore_errors=True)
