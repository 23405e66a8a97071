"""A worker's log, and the logs of all workers of its job, for core.worker.step_log: a store's values as records, and
back.

A boundary tensor on an accelerator may still be on its way to the host when it is sent. A thread waits for the copy, so
the training thread never does.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from recycle_plugin.core.messages.from_workers import LogBroken, Logged, Note
from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.worker.step_log import CommittedStep
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.devices.host import There
from recycle_plugin.runtime.devices.port import COPY_S, Copy, Device, Tensors
from recycle_plugin.runtime.log import records
from recycle_plugin.runtime.log.reader import KeptDatum, LogReader, NotKept
from recycle_plugin.runtime.log.records import DatumRecord, Part, Stream
from recycle_plugin.runtime.log.segment import Damaged
from recycle_plugin.runtime.log.writer import LogWriter, Resumed, Stopped
from recycle_plugin.runtime.movers.wire import raw, shapes_of
from recycle_plugin.runtime.worker.log_mirror import Mirror

FLUSH_S = 60.0
WRITTEN_S = 2.0  # seconds to wait for a datum in a log that has lost something


class WorkerLog:
    """This process's log in ``folder`` (core.worker.step_log.DiskLog). ``budget``: bytes that may wait for the disk."""

    def __init__(self, session: Session, folder: Path, stream: Stream, budget: int, device: Device) -> None:
        self._session, self._device = session, device
        self._writer = LogWriter(folder, stream, budget, self._report)
        self._waiting: deque[Callable[[], None]] = deque()  # waiting for a copy under way
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._checkpoint = 0  # the step of the last durable one

    @staticmethod
    def weigh(value: Any) -> int:
        return sum(tensor.nbytes for tensor in value) if type(value) is tuple else value.nbytes

    def keep(self, datum: Datum, value: Any, valid_from: int) -> None:
        """Log a value, once it is in host memory."""
        copy = self._copied(value)
        if copy is not None:
            self._after(copy, lambda: self._write(datum, copy, valid_from))

    def _copied(self, value: Any) -> Copy | None:
        kept: Copy | None = value
        return self._device.to_host(value, "what is logged", shared=True) if type(value) is tuple else kept

    def _write(self, datum: Datum, copy: Copy, valid_from: int) -> None:
        tensors = copy.wait(COPY_S)
        parts = tuple(Part(str(place), *form) for place, form in enumerate(shapes_of(tensors)))
        self._writer.keep(DatumRecord(datum, parts, valid_from), [*map(raw, tensors)])

    def commit(self, record: CommittedStep) -> None:
        """Log the record of a committed step."""
        norm = None if record.norm is None else float(record.norm)
        dtype = str(record.norm.dtype).removeprefix("torch.") if torch.is_tensor(record.norm) else ""
        kept = records.StepRecord(record.step, record.valid_from, norm, dtype)

        def write() -> None:
            self._writer.keep(kept)
            self._writer.commit(record.step, record.counts_from)

        self._after(None, write)

    def void(self, after: int, valid_from: int) -> None:
        """Void logged data of steps after ``after`` that is valid from before generation ``valid_from``."""
        self._after(None, lambda: self._writer.void(after, valid_from))

    def mark(self, step: int) -> None:
        """Tell the coordinator once others can read everything logged so far."""
        self._after(None, lambda: self._writer.reached(lambda: self._send(Logged(self._session.rank, step))))

    def checkpointed(self, step: int) -> None:
        """Drop the log up to ``step``, and go on logging if it had stopped."""
        self._checkpoint = step
        self._after(None, lambda: self._writer.checkpointed(step))

    def interrupted(self, step: int, why: str) -> None:
        """Log nothing from ``step`` on until the next checkpoint."""
        self._after(None, lambda: self._writer.interrupted(step, why))

    def resume(self) -> None:
        """Log everything again, of any step."""
        self._after(None, self._writer.resume)

    def refuses(self) -> str:
        """Return why nothing is logged now, in words; "" if everything is."""
        return self._writer.refusal

    def flush(self) -> None:
        """Wait until others can read everything logged so far."""
        done = threading.Event()
        self._after(None, done.set)
        if not done.wait(FLUSH_S):
            raise RecycleError(f"waited {FLUSH_S:.0f} s for what is logged to come from the device")
        self._writer.flush(FLUSH_S)

    def close(self) -> None:
        """Write the rest, and end."""
        with suppress(RecycleError):  # an error of the disk was reported
            self.flush()
            self._writer.close()

    def _report(self, news: Stopped | Resumed) -> None:
        rank, lacking = self._session.rank, news.step - 1
        if isinstance(news, Stopped):
            self._send(LogBroken(rank, news.step, news.why))
            return
        text = f"everything is logged again from step {news.step} on"
        if lacking > self._checkpoint:  # no replay leads on from that checkpoint
            self._send(LogBroken(rank, lacking, f"its log had stopped, and lacks parts of step {lacking}"))
            text += f", but it lacks parts of the steps up to {lacking} after the checkpoint of step {self._checkpoint}"
        self._send(Note(rank, "log", text, {"step": news.step}))

    def _send(self, message: object) -> None:
        with suppress(RecycleError, OSError):  # the session may be over; that is not the disk's fault
            self._session.send(message)

    # --- behind copies -----------------------------------------------------------------------------

    def _after(self, copy: Copy | None, write: Callable[[], None]) -> None:
        """Run ``write`` after everything asked before; at once if no copy is under way."""
        with self._changed:
            if not self._waiting and (copy is None or isinstance(copy, There)):
                write()
                return
            self._waiting.append(write)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="recycle: log copies", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                write = self._waiting[0]
            try:
                write()
            except Exception as error:  # the copy's error, which its sender sees too
                self.interrupted(0, f"a copy from the device has failed: {error}")
            with self._changed:
                self._waiting.popleft()


class JobLogs:
    """The logs of all workers of the run ``run_id``: those in ``folder``, and copies of other hosts' logs in ``mirror``
    (core.worker.step_log.ReplayLogs). A missing datum is looked for again, at most every ``look_s`` seconds: another
    stage may be writing it.
    """

    def __init__(self, folder: Path, run_id: str, look_s: float, mirror: Mirror | None = None) -> None:
        self._folder, self._run_id, self._look_s, self._mirror = folder, run_id, look_s, mirror
        self._damaged: dict[Datum, str] = {}
        self._signs: dict[Datum, dict[str, float]] = {}  # of a missing datum's loss, with the time since when
        self._reader, self._looked = self._read(None), time.monotonic()

    def _read(self, before: LogReader | None) -> LogReader:
        also = () if self._mirror is None else (self._mirror.folder,)
        return LogReader(self._folder, self._run_id, before=before, also=also)

    def _again(self) -> bool:
        """Read the logs again if that was not done lately. Returns whether it was done."""
        late = time.monotonic() - self._looked >= self._look_s
        if late:
            self._reader = self._read(self._reader)
            self._looked = time.monotonic()
        return late

    def record(self, step: int) -> CommittedStep | None:
        """Return the record of a committed step; None until somebody has written it."""
        records = self._reader.step_records(step) or (self._reader.step_records(step) if self._again() else [])
        found = [each.record for each in records]
        if not found:
            return None
        kept = max(found, key=lambda each: each.valid_from)
        norm = torch.tensor(kept.norm, dtype=getattr(torch, kept.dtype)) if kept.dtype else kept.norm
        return CommittedStep(step, norm, self._reader.counts_from(step), kept.valid_from)

    def get(self, datum: Datum) -> Tensors | None:
        """Return a datum's value in host memory, as sent or drawn. None if it is not written yet, or unreadable."""
        kept = self._kept(datum) or (self._kept(datum) if self._again() else None)
        if kept is None:
            return None
        return tuple(_tensor(part, raw) for part, raw in zip(kept.record.parts, kept.tensors, strict=True))

    def _kept(self, datum: Datum) -> KeptDatum | None:
        try:
            return self._reader.get(datum)
        except NotKept:
            return None
        except Damaged as error:
            self._damaged[datum] = str(error)
            return None

    def damaged(self, datum: Datum) -> bool:
        """Whether a requested datum is unreadable in all copies, or missing with other losses of its stage's logs. A
        record that is being written looks lost too, but otherwise at each look.
        """
        now, before = time.monotonic(), self._signs.get(datum, {})
        signs = self._signs[datum] = {sign: before.get(sign, now) for sign in self._reader.incomplete(datum.stage)}
        lost = next((sign for sign, since in signs.items() if now - since > WRITTEN_S), "")
        if lost:
            self._damaged.setdefault(datum, lost)
        return datum in self._damaged

    def faults(self) -> str:
        """Return the unreadable parts, in words; "" if there are none."""
        elsewhere = [] if self._mirror is None else self._mirror.faults()
        return "; ".join([*list(self._damaged.values())[-1:], *map(str, self._reader.faults[:3]), *elsewhere[:3]])

    def close(self) -> None:
        """Remove the copies."""
        if self._mirror is not None:
            self._mirror.close()


def _tensor(part: Part, raw: bytearray) -> torch.Tensor:
    dtype = getattr(torch, part.dtype)
    return torch.frombuffer(raw, dtype=dtype).view(part.shape) if raw else torch.empty(part.shape, dtype=dtype)
