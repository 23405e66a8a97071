"""DeepSpeed's monitors (TensorBoard, W&B, CSV, Comet) on whichever worker is first alive.

Stock opens and writes them on rank 0 only.  Where that is lost the next worker opens them anew, beside what is there: CSV
files are appended to, TensorBoard shows a folder's files as one run, W&B and Comet begin a run of their own unless the
environment names one to be resumed.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Iterator

import deepspeed.comm as dist
from deepspeed.monitor.monitor import MonitorMaster
from deepspeed.runtime.pipe.engine import PipelineEngine

from recycle_plugin.core.protocol import Generation

Entry = tuple[str, float, int]  # name, value, samples trained on so far
RANK_0 = SimpleNamespace(get_rank=lambda: 0)


class FirstLive:
    """An engine's ``monitor``: writes where ``is_first()``, and nowhere else.  ``note`` tells the user."""

    def __init__(self, stock: MonitorMaster, is_first: Callable[[], bool], note: Callable[[str, str], None]) -> None:
        self._stock = stock
        self._is_first = is_first
        self._note = note
        self._opened = dist.get_rank() == 0
        self.enabled = stock.enabled

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)

    def write_events(self, entries: list[Entry]) -> None:
        """Entries are tuples of name, value and samples so far, as stock's."""
        if not self.enabled or not entries or not self._is_first():
            return
        with _rank_0():
            if self._opened or self._open():
                self._stock.write_events(entries)

    def _open(self) -> bool:
        self._opened = True
        try:
            self._stock = MonitorMaster(self._stock.monitor_config)
        except Exception as error:  # a third party's, which may not reach its server from here: training goes on without it
            self._note("warning", f"worker {dist.get_rank()} is the first one alive, and can't open DeepSpeed's monitors: {error}")
            self.enabled = False
            return False
        csv = self._stock.csv_monitor
        if csv is not None:  # what the first worker has begun has its heading
            csv.filenames = [path.stem for path in Path(csv.log_dir).glob("*.csv")]
        return True


class Reporting(PipelineEngine):
    """The part of :class:`~recycle_plugin.adapters.deepspeed.engine.RecycleEngine` that says how far training is."""

    def _is_first(self) -> bool:
        generation = self._job.session.generation
        return self._is_first_in(generation) if generation is not None else self._job.session.rank == 0

    def _is_first_in(self, generation: Generation) -> bool:
        return self._job.session.worker == generation.roster.first.worker

    def _report_step(self) -> None:
        """Stock's own line and monitor entries, from the lowest live rank."""
        if self._is_first() and self.steps_per_print() is not None and self.global_steps % self.steps_per_print() == 0:
            print(f"steps: {self.global_steps} loss: {self.agg_train_loss:0.4f}", flush=True)
        if self.monitor.enabled:
            told = [("Train/Samples/train_loss", self.agg_train_loss.item(), self.global_samples)]
            stock = self._job.session.rank == 0  # whose step has written the learning rate
            self.monitor.write_events(told if stock else [*told, ("Train/Samples/lr", self.get_lr()[0], self.global_samples)])
        self._report_commits()

    def _report_commits(self) -> None:
        """What is news of committed steps goes to the monitors; once, whoever was first when it came."""
        batch = self.train_batch_size()
        for generation, commit in self._job.session.take_news():
            if self._is_first_in(generation):
                samples = self.global_samples - (self.global_steps - commit.step) * batch
                self.monitor.write_events(figures(commit.figures, generation.number, batch, samples))


def figures(known: dict, generation: int, batch: int, samples: int) -> list[Entry]:
    """Entries of a committed step.  ``known``: core.work's; ``batch``: samples of a step; ``samples``: of all steps so far."""
    values = {"live_workers": known.get("workers"), "membership_changes": generation, "bubble_share": known.get("bubble_share"),
              "redone_share": known.get("redone_share"), "samples_per_second": batch / known["step_s"] if "step_s" in known else None}  # fmt: skip
    return [(f"Recycle/{name}", value, samples) for name, value in values.items() if value is not None]


@contextmanager
def _rank_0() -> Iterator[None]:
    """DeepSpeed's monitors, and nobody else, take this worker for rank 0."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("deepspeed.monitor.") and hasattr(module, "dist")]
    for module in modules:
        module.dist = RANK_0
    try:
        yield
    finally:
        for module in modules:
            module.dist = dist
