"""DeepSpeed's checkpoints from a job that loses workers: whole, also while degraded, and never half of one under its name.

Stock DeepSpeed lets replica 0 write each stage's layers and optimizer state, and rank 0 the ``latest`` file; either may be dead.
Here the lowest live replica of each stage plays the former part while stock code runs.

It writes to a folder of another name.  When the coordinator says that everybody has written (core.meeting), the lowest live rank
gives the folder its name, and then writes ``latest``.  Whoever dies before that is seen by all: they save once more, to another folder.
A late writer, given up by the others and still alive, writes to a folder that nobody uses any more.
"""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Iterator

from recycle_plugin.core.executor import Interrupted
from recycle_plugin.core.ids import Seat
from recycle_plugin.core.protocol import Generation
from recycle_plugin.core.watch import ELSEWHERE
from recycle_plugin.runtime import folders
from recycle_plugin.runtime.errors import RecycleError
from recycle_plugin.runtime.loop import Loop
from recycle_plugin.runtime.session import Session

UNFINISHED = ".incomplete-"
Reach = Callable[[str], None]


class Saving:
    """Of a job's checkpoints, by the worker of ``session``.  ``reach(point)`` is where injected faults strike."""

    def __init__(self, session: Session, loop: Loop, recover: Callable[[], None], reach: Reach) -> None:
        self._session, self._loop = session, loop
        self._recover, self._reach = recover, reach

    def save(self, folder: Path, tag: str, latest: bool, write: Callable[[str], None], said: str) -> None:
        """Return when the checkpoint ``folder``/``tag`` is in place.  ``write(tag)``: this worker's files, under another tag."""
        while True:
            try:
                self._save(folder, tag, latest, write, said)
                return
            except Interrupted:
                self._recover()

    def _save(self, folder: Path, tag: str, latest: bool, write: Callable[[str], None], said: str) -> None:
        session, place = self._session, f"save_checkpoint({str(folder)!r}, {tag!r})"
        session.assure("a checkpoint")
        with session.heart.at(ELSEWHERE, "a checkpoint"), unwatched(session):
            self._reach("checkpoint.start")
            write(self.unfinished(tag))
            self._reach("checkpoint.written")
        self._loop.meet(place, {})
        if self.is_first:
            self.publish(folder, tag, self.unfinished(tag), latest, said)
        self._loop.meet(f"the end of {place}", {})

    def publish(self, folder: Path, tag: str, unfinished: str, latest: bool, said: str) -> None:
        """All files are there."""
        session = self._session
        with session.heart.at(ELSEWHERE, "a checkpoint"):
            session.assure("a checkpoint", interruptible=False)
            self._reach("checkpoint.publish")
            folders.put_in_place(folder / unfinished, folder / tag)
            self._reach("checkpoint.named")
            if latest:
                folders.write_whole(folder / "latest", tag)
            session.note("checkpoint", f"{said} in {folder / tag}", path=str(folder / tag))
            self._reach("checkpoint.latest")
            for left in folder.glob(f"*{UNFINISHED}*"):
                folders.remove(left)

    def unfinished(self, tag: str) -> str:
        """Another one for each membership."""
        return f"{tag}{UNFINISHED}{self._session.job_id}-{self._session.number}"

    @property
    def is_first(self) -> bool:
        return self._session.rank == min(member.rank for member in self._session.generation.members)


@contextmanager
def unwatched(session: Session) -> Iterator[None]:
    """A membership change breaks a collective instead of being dealt with in it."""
    between, session.between_steps = session.between_steps, None
    try:
        yield
    finally:
        session.between_steps = between


@contextmanager
def stand_in(engine: Any, seat: Seat, generation: Generation, reach: Reach) -> Iterator[None]:
    """``engine`` writes what its stage's, and the job's, lowest live member has to write."""
    writer = min(member.seat.replica for member in generation.members if member.seat.stage == seat.stage) == seat.replica
    first = min(member.rank for member in generation.members) == engine.global_rank
    grid, module = engine.grid, engine.module
    kept = (grid.data_parallel_id, engine.save_non_zero_checkpoint, engine.global_rank, module.checkpoint_parallel_write_pipeline, engine.checkpoint_engine)
    grid.data_parallel_id = 0 if writer else seat.replica + grid.data_parallel_size
    engine.save_non_zero_checkpoint = writer
    engine.global_rank = 0 if first else max(1, engine.global_rank)
    module.checkpoint_parallel_write_pipeline = False
    engine.checkpoint_engine = _Durable(engine.checkpoint_engine, reach)
    try:
        yield
    finally:
        (grid.data_parallel_id, engine.save_non_zero_checkpoint, engine.global_rank, module.checkpoint_parallel_write_pipeline,
         engine.checkpoint_engine) = kept  # fmt: skip


class _Durable:
    """DeepSpeed's own checkpoint engine, whose files are on the disk when they are said to be written."""

    def __init__(self, stock: Any, reach: Reach) -> None:
        self._stock, self._reach = stock, reach

    def save(self, state_dict: Any, path: str) -> None:
        self._stock.save(state_dict=state_dict, path=path)
        folders.sync(Path(path))
        self._reach("checkpoint.file")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)


def check_stages(folder: Path, tag: str | None, stages: int) -> None:
    """A checkpoint of another number of stages: stock DeepSpeed would give every stage the first one's optimizer state."""
    latest = folder / "latest"
    if tag is None and latest.is_file():
        tag = latest.read_text().strip()
    found = len(list((folder / str(tag)).glob("mp_rank_*_model_states.pt"))) if tag is not None else 0
    if found not in (0, stages):
        raise RecycleError(
            f"load_checkpoint: {folder / str(tag)} is of {found} pipeline stages, and this job has {stages}; DeepSpeed keeps the optimizer's "
            f"state by stage, and its universal checkpoints need ZeRO; use {found} stages (with any number of replicas), or load_module_only=True"
        )
