"""DeepSpeed's monitors (TensorBoard, W&B, CSV, Comet) on the first live worker.

Stock opens and writes them on rank 0 only. If that worker is lost, the next one opens them beside what is there. CSV
files are appended to, and TensorBoard shows a folder's files as one run. W&B resumes the job's run; offline it has a
folder per process, and entries around a loss may appear twice. Comet begins a run of its own unless the environment
names one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import deepspeed.comm as dist
from deepspeed.monitor.monitor import MonitorMaster

from recycle_plugin.adapters.deepspeed.rank0 import taken_for
from recycle_plugin.adapters.wandb_run import one_run
from recycle_plugin.observability.telemetry import Droppable, console
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.stage.ports import Scaler
from recycle_plugin.runtime.system.console import print_whole

UNWRITTEN_S = 20.0  # wandb 0.31 writes to disk every 15 s; what a killed process may not have written is repeated
Entry = tuple[str, float, int]  # name, value, samples trained so far


@contextmanager
def opening(session: Session) -> Iterator[None]:
    """A context in which stock opens an engine's monitors, W&B with the job's run. In a process that comes back it
    opens none: they are opened once it is the first worker.
    """
    unopened = taken_for(1, "deepspeed.monitor.") if session.view.newcomer else nullcontext()
    with one_run(session.job_id), unopened:
        yield


class FirstLive:
    """Replaces an engine's ``monitor``: only the first live worker writes, and values that can't be written are
    dropped.
    """

    def __init__(self, stock: MonitorMaster, session: Session) -> None:
        self._stock, self._session = stock, session
        note = self._note = session.note
        self._opened = dist.get_rank() == 0 and not session.view.newcomer
        self.enabled = stock.enabled
        self._target = Droppable("DeepSpeed's monitors", "entries", note)
        self._last: deque[tuple[float, list[Entry]]] = deque()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)

    def write_events(self, entries: list[Entry]) -> None:
        """Write entries (name, value, samples so far) if this is the first live worker."""
        if not self.enabled or not entries:
            return
        if not self._session.view.is_first:
            self._remember(entries)
            return
        with taken_for(0, "deepspeed.monitor."):
            if self._opened or self._open():
                self._target.attempt(lambda: self._stock.write_events(entries), Exception)

    def _open(self) -> bool:
        self._opened = True
        try:
            with one_run(self._session.job_id):
                self._stock = MonitorMaster(self._stock.monitor_config)
        except (
            Exception
        ) as error:  # a third party's, which may not reach its server from here: training goes on without it
            self._note("warning", f"the first worker alive can't open DeepSpeed's monitors: {error}")
            self.enabled = False
            return False
        if self._stock.wandb_monitor is not None:
            self._target.attempt(lambda: self._stock.wandb_monitor.write_events([*self._recent()]), Exception)
        csv = self._stock.csv_monitor
        if csv is not None:  # what the first worker has begun has its heading
            csv.filenames = [path.stem for path in Path(csv.log_dir).glob("*.csv")]
        return True

    def _remember(self, entries: list[Entry]) -> None:
        """Keep entries as long as the first worker's W&B may not have them on disk."""
        if self._stock.monitor_config.wandb.enabled:
            self._last.append((monotonic(), entries))
            while self._last[0][0] < monotonic() - UNWRITTEN_S:
                self._last.popleft()

    def _recent(self) -> Iterator[Entry]:
        while self._last:
            yield from self._last.popleft()[1]


class Progress(NamedTuple):
    """How far training is: ``steps`` and ``samples`` so far, and the samples of the next step."""

    steps: int
    samples: int
    batch: int


class Reporting:
    """Reports progress as stock does, from the first live worker: a line every ``every`` steps, and entries of
    ``monitor()``, which a script may have replaced. ``scaler``: of the loss in fp16.
    """

    def __init__(
        self,
        session: Session,
        monitor: Callable[[], Any],
        every: int | None,
        progress: Callable[[], Progress],
        learning_rate: Callable[[], float],
        scaler: Scaler | None,
    ) -> None:
        self._session, self._monitor, self._every, self._progress = session, monitor, every, progress
        self._learning_rate, self._scaler = learning_rate, scaler
        self._printing = Droppable(console(), "lines", session.note)
        self._spent_s = 0.0  # in train_batch, since the last line

    @contextmanager
    def timed(self) -> Iterator[None]:
        """A context in which a step is trained; its time is part of stock's line."""
        begun = monotonic()
        yield
        self._spent_s += monotonic() - begun

    def step(self, loss: float) -> None:
        """Write stock's line and monitor entries of a step."""
        now, every = self._progress(), self._every
        if every is not None and now.steps % every == 0:
            each_s, self._spent_s = self._spent_s / every, 0.0
            line = (
                f"steps: {now.steps} loss: {loss:0.4f} iter time (s): {each_s:0.3f} "
                f"samples/sec: {now.batch / each_s:0.3f}"
            )
            if self._session.view.is_first:
                self._printing.attempt(lambda: print_whole(line))
        monitor = self._monitor()
        if monitor.enabled:
            told = {"train_loss": loss}
            if self._session.rank != 0:  # rank 0's step has written the learning rate
                told["lr"] = self._learning_rate()
            if self._scaler is not None:  # it has changed since stock code's step
                told["loss_scale"] = self._scaler.loss_scale
            monitor.write_events([(f"Train/Samples/{name}", value, now.samples) for name, value in told.items()])
        self.commits()

    def evaluated(self, loss: float) -> None:
        """Write stock's monitor entry of an evaluation."""
        monitor = self._monitor()
        if self._session.view.is_first and monitor.enabled:
            monitor.write_events([("Train/Samples/eval_loss", loss, self._progress().samples)])

    def commits(self) -> None:
        """Write figures of newly committed steps to the monitors, from the worker that was first at the commit."""
        now = self._progress()
        for generation, commit in self._session.view.take_news():
            if generation is not None and generation.roster.first.worker == self._session.view.worker:
                samples = now.samples - (now.steps - commit.step) * now.batch
                self._monitor().write_events(figures(commit.figures, generation.number, now.batch, samples))


def figures(known: dict[str, Any], generation: int, batch: int, samples: int) -> list[Entry]:
    """Return the monitor entries of a committed step. ``known``: its figures, of core.coordinator.facts.step_figures;
    ``batch``: samples of a step; ``samples``: of all steps so far.
    """
    values = {
        "live_workers": known.get("workers"),
        "membership_changes": generation,
        "bubble_share": known.get("bubble_share"),
        "redone_share": known.get("redone_share"),
        "samples_per_second": batch / known["step_s"] if "step_s" in known else None,
    }
    return [(f"Recycle/{name}", value, samples) for name, value in values.items() if value is not None]
