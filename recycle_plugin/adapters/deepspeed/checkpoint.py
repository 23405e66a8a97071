"""Stock checkpoints from a degraded pipeline, complete.

Stock DeepSpeed lets replica 0 write each stage's layers and optimizer state, and rank 0 what belongs to all; either may be dead.
Here the lowest live replica of each stage, and the lowest live rank, play those parts while the stock code runs.
"""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Iterator

from deepspeed.checkpoint import constants as names
from deepspeed.checkpoint.utils import clone_tensors_for_torch_save

from recycle_plugin.core.ids import Seat
from recycle_plugin.core.protocol import Generation
from recycle_plugin.runtime import folders
from recycle_plugin.runtime.errors import RecycleError


@contextmanager
def stand_in(engine: Any, seat: Seat, generation: Generation, files: Durable | Copied) -> Iterator[None]:
    """``engine`` writes, through ``files``, what its stage's and the job's lowest live member has to write."""
    writer = live_replicas(seat.stage, generation)[0] == seat.replica
    first = generation.roster.first.rank == engine.global_rank
    grid, module = engine.grid, engine.module
    kept = (grid.data_parallel_id, engine.save_non_zero_checkpoint, engine.global_rank, module.checkpoint_parallel_write_pipeline, engine.checkpoint_engine)
    grid.data_parallel_id = 0 if writer else seat.replica + grid.data_parallel_size
    engine.save_non_zero_checkpoint = writer
    engine.global_rank = 0 if first else max(1, engine.global_rank)
    module.checkpoint_parallel_write_pipeline = False
    engine.checkpoint_engine = files
    try:
        yield
    finally:
        (grid.data_parallel_id, engine.save_non_zero_checkpoint, engine.global_rank, module.checkpoint_parallel_write_pipeline,
         engine.checkpoint_engine) = kept  # fmt: skip


@contextmanager
def without_optimizer(engine: Any) -> Iterator[None]:
    """Stock code neither writes nor reads the optimizer's state: in bf16 it has files of its own (bf16.py)."""
    optimizer = engine.optimizer
    engine.optimizer = None if engine.masters is not None else optimizer
    try:
        yield
    finally:
        engine.optimizer = optimizer


def parts_of(seat: Seat, generation: Generation, parts: int) -> range:
    """Which of so many parts the worker at ``seat`` writes: each is written by one of the stage's live workers."""
    live = live_replicas(seat.stage, generation)
    return range(live.index(seat.replica), parts, len(live))


def live_replicas(stage: int, generation: Generation) -> list[int]:
    return sorted(member.seat.replica for member in generation.roster.stage(stage))


class Durable:
    """DeepSpeed's own checkpoint engine, whose files are on the disk when they are said to be written."""

    def __init__(self, stock: Any, reach: Callable[[str], None]) -> None:
        self._stock, self._reach = stock, reach

    def save(self, state_dict: Any, path: str) -> None:
        self._stock.save(state_dict=state_dict, path=path)
        folders.sync(Path(path))
        self._reach("checkpoint.file")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)


class Copied:
    """In its place: what it is to save is copied to host memory, and saved by ``write``."""

    def __init__(self, durable: Durable) -> None:
        self._durable = durable
        self._copies: list[tuple[Any, str]] = []

    def save(self, state_dict: Any, path: str) -> None:
        self._copies.append((clone_tensors_for_torch_save(state_dict), path))

    def preserves_storage_sharing(self) -> bool:
        return False  # so nobody else makes copies

    def write(self) -> None:
        while self._copies:
            self._durable.save(*self._copies.pop(0))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._durable, name)


def chosen(folder: Path, tag: str | None) -> Path:
    """The checkpoint that stock code will load, if it is there."""
    latest = folder / "latest"
    return folder / (latest.read_text().strip() if tag is None and latest.is_file() else str(tag))


def check_loadable(path: Path, stages: int, bf16: bool) -> None:
    """A checkpoint of another number of stages: stock DeepSpeed would give every stage the first one's optimizer state.  Or of another precision."""
    found = len(list(path.glob(f"{names.MODEL_FILE_PREFIX}*{names.MODEL_FILE_SUFFIX}")))
    if found not in (0, stages):
        raise RecycleError(
            f"load_checkpoint: {path} is of {found} pipeline stages, and this job has {stages}; DeepSpeed keeps the optimizer's "
            f"state by stage, and its universal checkpoints need ZeRO; use {found} stages (with any number of replicas), or load_module_only=True"
        )
    of_bf16 = any(path.glob(f"{names.BF16_ZERO_FILE_PREFIX}*"))
    if not bf16 and any(path.glob(f"{names.ZERO_FILE_PREFIX}*")):
        raise RecycleError(f"load_checkpoint: {path} has the optimizer's state in ZeRO's shards, which in fp32 are not read; load the weights alone with "
                           "load_module_only=True")  # fmt: skip
    if found and of_bf16 != bf16:
        one, other = ("a bf16", "in fp32") if of_bf16 else ("an fp32", "in bf16")
        raise RecycleError(f"load_checkpoint: {path} is of {one} job, and this one is {other}, so the optimizer's state does not fit; set bf16.enabled to "
                           f"{str(of_bf16).lower()}, or load the weights alone with load_module_only=True")
