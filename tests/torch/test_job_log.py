"""A worker's log as the worker uses it: values in, messages to the coordinator out."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from recycle_plugin.core.messages.from_workers import LogBroken, Logged, Note
from recycle_plugin.core.worker.step_log import CommittedStep
from recycle_plugin.runtime.devices.host import There
from recycle_plugin.runtime.worker import job_log
from recycle_plugin.runtime.worker.job_log import WRITTEN_S, JobLogs, WorkerLog
from tests.support.logs import PATIENCE_S, RUN, act, stream


class Session:
    """The messages that were sent, for who waits for one of a kind."""

    rank = 1

    def __init__(self) -> None:
        self.sent: list[object] = []
        self._more = threading.Condition()

    def send(self, message: object) -> None:
        with self._more:
            self.sent.append(message)
            self._more.notify_all()

    def wait(self, kind: type, count: int = 1) -> list:
        def found() -> list:
            return [each for each in self.sent if isinstance(each, kind)]

        with self._more:
            assert self._more.wait_for(lambda: len(found()) >= count, PATIENCE_S), f"{count} of {kind}: {self.sent}"
            return found()


def made(folder: Path, budget: int = 1 << 20) -> tuple[Session, WorkerLog]:
    session = Session()
    return session, WorkerLog(session, folder, stream(), budget, SimpleNamespace())


def keep(log: WorkerLog, step: int) -> None:
    log.keep(act(step), There((torch.full((3,), float(step), dtype=torch.bfloat16),)), 0)
    log.commit(CommittedStep(step, torch.tensor(0.5)))
    log.mark(step)


def test_what_is_kept_is_told_and_read(tmp_path) -> None:
    session, log = made(tmp_path)
    keep(log, 1)
    assert session.wait(Logged) == [Logged(1, 1)]
    jobs = JobLogs(tmp_path, RUN, 0.0)
    assert torch.equal(jobs.get(act(1))[0], torch.ones(3, dtype=torch.bfloat16))
    assert jobs.record(1) == CommittedStep(1, 0.5) and jobs.record(1).norm.dtype is torch.float32
    assert not jobs.faults() and jobs.record(2) is jobs.get(act(2)) is None, "however often it looks"
    log.close()


def test_a_record_that_is_being_written_is_not_lost_until_it_stays_torn(tmp_path, monkeypatch) -> None:
    """A disk may take longer for what waits than a reader does for a look."""
    clock = [0.0]
    monkeypatch.setattr(job_log, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    _, log = made(tmp_path)
    keep(log, 1)
    log.flush()
    (path,) = tmp_path.glob("*.log")
    jobs = JobLogs(tmp_path, RUN, 0.0)

    def looks(seconds: float) -> bool:
        clock[0] += seconds
        return jobs.get(act(2)) is not None or jobs.damaged(act(2))

    for _ in range(9):
        with path.open("ab") as file:
            file.write(b"RP")
        assert not looks(WRITTEN_S / 2)
    assert not looks(WRITTEN_S / 2) and looks(WRITTEN_S)
    log.close()


def test_a_lone_number_is_kept_whatever_its_stride(tmp_path) -> None:
    _, log = made(tmp_path)
    log.keep(act(1), There((torch.arange(4.0)[1::2][:1],)), 0)
    log.commit(CommittedStep(1))
    log.flush()
    assert JobLogs(tmp_path, RUN, 0.0).get(act(1))[0].tolist() == [1.0]
    log.close()


@pytest.mark.parametrize("checkpoint, broken", [(4, [2, 5]), (5, [2]), (7, [2])])
def test_a_checkpoint_of_a_step_in_the_gap_is_none_to_replay_from(tmp_path, checkpoint, broken) -> None:
    """The log goes on behind step 5, of which something was refused: only a checkpoint of that step or of a later one
    can be replayed from.
    """
    session, log = made(tmp_path)
    keep(log, 1)
    log.interrupted(2, "for a test")
    for step in (3, 4, 5):
        keep(log, step)
    log.checkpointed(checkpoint)
    (note,) = session.wait(Note)
    behind = ", but it lacks parts of the steps up to 5 after the checkpoint of step 4" * (checkpoint == 4)
    assert note.text == f"everything is logged again from step 6 on{behind}"
    log.close()
    assert [each.step for each in session.sent if isinstance(each, LogBroken)] == broken
