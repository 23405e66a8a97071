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
