"""Stock checkpoints from a degraded pipeline, complete.

Stock DeepSpeed lets replica 0 write each stage's layers and optimizer state, and rank 0 what belongs to all; either may be dead.
Here the lowest live replica of each stage, and the lowest live rank, play those parts while the stock code runs.

What of a stage's state (runtime/state.py) is not in what stock code hands over to be saved goes into a file of the stage's own beside it, which stock
does not read: the loss scale, and weights of tied layers that have a ``forward_fn``.  Where nothing is left there is no such file.
"""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import AbstractSet, Any, Callable, Iterator, Mapping

import torch
from deepspeed.checkpoint import constants as names

from recycle_plugin.core.ids import Seat
from recycle_plugin.core.protocol import Generation
from recycle_plugin.runtime import folders
from recycle_plugin.runtime.device import fetch
from recycle_plugin.runtime.errors import RecycleError
from recycle_plugin.runtime.state import StageState, form_of

STOCKS = frozenset(("optimizer", "scheduler", "counters"))  # small parts that stock's files have
FOLLOWING = frozenset(("places",))  # small parts that the step and the batch size decide, once they are loaded


@contextmanager
def stand_in(engine: Any, seat: Seat, generation: Generation, files: Durable | Copied | Inventory) -> Iterator[None]:
    """``engine`` writes, through ``files``, what its stage's and the job's lowest live member has to write."""
    writer = is_writer(seat, generation)
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


class Inventory:
    """In a checkpoint engine's place: hands what it is to save on to ``files``, and notes what of a stage's state is in that.

    ``places``: where the module has the layers that files are named by; ``parameters``: the optimizer's, in its order; ``known``: what else is in files.
    """

    def __init__(self, files: Durable | Copied, places: Callable[[int], str], parameters: list[str], known: AbstractSet[str]) -> None:
        self._files, self._places, self._parameters = files, places, parameters
        self._saved = set(known)

    def save(self, state_dict: Any, path: str) -> None:
        name = Path(path).name
        if name.startswith(names.LAYER_FILE_PREFIX):
            layer = int(name.removeprefix(names.LAYER_FILE_PREFIX).partition("-")[0])
            self._saved |= {f"weights/{self._places(layer)}.{key}" for key in state_dict}
        else:
            states = (state_dict["optimizer"] or {}).get("state", {})
            self._saved |= {f"optimizer/{parameter}/{kind}" for place, parameter in enumerate(self._parameters) for kind in states.get(place, ())}
        self._files.save(state_dict, path)

    def left(self, state: StageState) -> dict[str, Any]:
        """What is in no file yet."""
        small = {name: value for name, value in state.small().items() if value and name not in STOCKS | FOLLOWING}
        tensors = {name: tensor.detach() for name, tensor in state.tensors().items() if name not in self._saved}
        return {"step": state.version.step, "small": small, "tensors": tensors} if small or tensors else {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)


def file_beside(folder: Path, stage: int) -> Path:
    """The file of what is left."""
    return folder / f"recycle_stage_{stage:02d}.pt"


def beside(folder: Path, stage: int, step: int | None, read: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """What was left of ``stage`` in a checkpoint of ``step``; None: of whatever step, for the weights alone.

    RecycleError where it is of another step, as where stock has saved once more under the same tag, or missing beside that of other stages: small parts
    are alike in all, so that stages would go on with different ones.
    """
    file = file_beside(folder, stage)
    if file.is_file():
        saved = read(str(file))
        if step is not None and saved["step"] != step:
            raise RecycleError(f"load_checkpoint: {file} is of step {saved['step']}, and the checkpoint is of step {step}; load another one, or only the weights "
                               "with load_module_only=True")  # fmt: skip
        return saved
    others = sorted(folder.glob("recycle_stage_*.pt")) if step is not None else []
    if others and read(str(others[0]))["small"]:
        raise RecycleError(f"load_checkpoint: {file} is missing, and {others[0].name} is there; copy the checkpoint whole, load another one, or only the weights "
                           "with load_module_only=True")  # fmt: skip
    return {"small": {}, "tensors": {}}


@torch.no_grad()
def take_beside(state: StageState, saved: Mapping[str, Any], optimizer: bool) -> None:
    """``saved``: what was left; without ``optimizer``, only the weights of it."""
    if optimizer:
        state.put(saved["small"])
    for name, value in saved["tensors"].items():
        if optimizer or name.startswith("weights/"):
            if name not in state.tensors():
                state.make(name, form_of(value))
            state.tensors()[name].copy_(value)


def parts_of(seat: Seat, generation: Generation, parts: int) -> range:
    """Which of so many parts the worker at ``seat`` writes: each is written by one of the stage's live workers."""
    live = live_replicas(seat.stage, generation)
    return range(live.index(seat.replica), parts, len(live))


def is_writer(seat: Seat, generation: Generation) -> bool:
    """Of what its stage writes once."""
    return live_replicas(seat.stage, generation)[0] == seat.replica


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
        self._copies.append((_copied(state_dict, path), path))

    def preserves_storage_sharing(self) -> bool:
        return False  # so nobody else makes copies

    def write(self) -> None:
        while self._copies:
            self._durable.save(*self._copies.pop(0))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._durable, name)


def _copied(value: Any, path: str) -> Any:
    """With tensors of its own, in host memory."""
    if torch.is_tensor(value):
        return fetch(value, f"a copy for {path}", shared=False)
    if isinstance(value, dict):
        return type(value)({key: _copied(each, path) for key, each in value.items()})
    if isinstance(value, (list, tuple)):
        return (list if isinstance(value, list) else tuple)(_copied(each, path) for each in value)
    return value


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
