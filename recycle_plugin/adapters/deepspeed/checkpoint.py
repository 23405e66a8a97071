"""Stock checkpoints from a degraded pipeline, complete.

In stock DeepSpeed replica 0 writes each stage's layers and optimizer state, and rank 0 writes what belongs to all;
either may be dead. Here the lowest live replica of each stage, and the lowest live rank, take these roles while stock
code runs.

A stage's state (runtime/state/stage_state.py) may have parts that stock's files have no place for: the loss scale of
fp32 jobs, and weights of tied layers with a ``forward_fn``. They go into a file of the stage beside stock's, which is
written only if there is something to put into it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from pickle import PickleError
from typing import Any

import torch
from deepspeed.checkpoint import constants as names
from deepspeed.runtime.pipe.engine import PipelineEngine

from recycle_plugin import folders
from recycle_plugin.adapters.deepspeed.bf16 import StateFiles, check_kind
from recycle_plugin.adapters.deepspeed.fp16 import is_half
from recycle_plugin.adapters.deepspeed.rank0 import first_for_stock, replaced
from recycle_plugin.adapters.deepspeed.ties import Ties
from recycle_plugin.core.messages.activity import ELSEWHERE
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.devices.host import HOST
from recycle_plugin.runtime.stage.ports import CheckpointFormat, CheckpointShare, Scaler
from recycle_plugin.runtime.state.stage_state import StageState

STOCKS = frozenset(("optimizer", "scheduler", "counters"))  # small parts that stock's files have
SCALE = frozenset(("loss_scale",))  # a small part that stock's fp16 files have too
FOLLOWING = frozenset(("places",))  # small parts that follow from the step and the batch size, once these are loaded


@dataclass(frozen=True)
class EngineFiles(CheckpointFormat):
    """DeepSpeed's CheckpointFormat, by stock code of ``engine`` and beside it. That code is methods of the engine,
    which write and read the state kept there.

    ``stock``: DeepSpeed's checkpoint engine. ``parts``: files of the optimizer's state, if it is not in stock's model
    file. ``scaler``: its state belongs in the checkpoint. ``client_state``, ``exclude_frozen_parameters``: as scripts
    give them to ``save_checkpoint``.
    """

    engine: PipelineEngine
    stock: Any
    session: Session
    ties: Ties
    parts: StateFiles | None
    scaler: Scaler | None
    client_state: Mapping[str, Any] = field(default_factory=dict)
    exclude_frozen_parameters: bool = False

    def gather(self, state: StageState, path: Path, share: CheckpointShare) -> None:
        """Hand over what stock code saves here, and the state that it leaves out."""
        engine, grid, writes = self.engine, self.engine.grid, share.turn == 0
        known = self.ties.saved() | self._own(state)
        inventory = Inventory(self.stock, share, self.ties.place, list(state.optimizer.parameters()), known)
        with (
            replaced(grid, data_parallel_id=0 if writes else engine.seat.replica + grid.data_parallel_size),
            replaced(engine, save_non_zero_checkpoint=writes, checkpoint_engine=inventory),
            replaced(engine.module, checkpoint_parallel_write_pipeline=False),
            first_for_stock(engine, self.session.view.is_first),
            self._without_optimizer(),
        ):
            PipelineEngine.save_checkpoint(
                engine, str(path.parent), path.name, self.client_state, False, self.exclude_frozen_parameters
            )
        there = STOCKS | (SCALE if engine.fp16_enabled() else frozenset())
        if not type(engine.lr_scheduler).__module__.startswith(("torch.", "deepspeed.", "builtins")):
            there -= {"scheduler"}  # its state_dict may leave out anything
        if writes and (left := inventory.left(state, there)):
            share.save(file_beside(path, engine.stage_id), left)
        if self.parts is not None:
            count = grid.data_parallel_size
            for number in range(share.turn, count, share.turns):
                share.save(
                    path / self.parts.name(number), {**self.parts.part(number, count), "ds_config": engine.config}
                )

    def dump(self, contents: Any, file: Any) -> None:
        self.stock.save(state_dict=contents, path=file)

    def _own(self, state: StageState) -> set[str]:
        """Return the names of state tensors that are in a checkpoint in another form (bf16.py, fp16.py)."""
        return (
            set()
            if self.engine.masters is None
            else {name for name in state.tensors() if name.startswith(("masters/", "optimizer/"))}
        )

    @contextmanager
    def loading(self, folder: Path) -> Iterator[None]:
        """A context in which stock code loads the checkpoint ``folder``. Raises RecycleError if it can't."""
        busy = self.session.heartbeats.at(ELSEWHERE, "a checkpoint")
        with in_words(folder), busy, self._without_optimizer(), self.ties.loading():
            yield

    def check_whole(self, folder: Path) -> None:
        """Raise RecycleError if the checkpoint ``folder``, or a file of this worker's stage in it, is missing."""
        if not folder.is_dir():
            raise RecycleError(f"load_checkpoint: there is no folder {folder}; load another checkpoint")
        module, missing = self.engine.module, []
        if not self.engine._get_all_ckpt_names(str(folder.parent), folder.name):
            missing.append(f"{names.MODEL_FILE_PREFIX}*{names.MODEL_FILE_SUFFIX}")
        for number, layer in enumerate(module.forward_funcs):
            if hasattr(layer, "load_state_dict") and not module.ckpt_layer_path_list(str(folder), number):
                missing.append(Path(module.ckpt_layer_path("", number)).name)
        if missing:
            raise RecycleError(
                f"load_checkpoint: {folder} has no {', '.join(missing)}; copy the checkpoint whole, or load another one"
            )

    def _without_optimizer(self) -> AbstractContextManager[None]:
        """A context in which stock code ignores the optimizer's state, if that has files of its own."""
        return nullcontext() if self.parts is None else replaced(self.engine, optimizer=None)

    def read(self, state: StageState, folder: Path) -> None:
        """Load this worker's stage from the checkpoint ``folder`` alone, as a newcomer does. Raises RecycleError."""
        self.check_whole(folder)
        with replaced(self.engine, checkpoint_engine=Verified(self.stock)):
            with self.loading(folder):
                found = PipelineEngine.load_checkpoint(self.engine, str(folder.parent), folder.name)
            if found[0] is None:
                raise RecycleError(f"{folder} has no file of stage {self.engine.stage_id}")
            self.load_rest(state, Path(found[0]).parent, True)

    def load_rest(self, state: StageState, path: Path, with_optimizer: bool) -> None:
        """Load the values that stock code leaves to the plugin, from the checkpoint ``path``. Raises RecycleError for a
        misfit.
        """
        read = self.engine.checkpoint_engine.load
        with in_words(path), self.session.heartbeats.at(ELSEWHERE, "a checkpoint"):
            self.ties.load(path, partial(read, map_location=self.engine.device))
            if self.parts is not None and with_optimizer:
                self.parts.read(path, partial(read, map_location=HOST))
            self.load_beside(state, path, with_optimizer)
            if self.engine.masters is not None and not with_optimizer:
                self.engine.masters.take_over()
            if self.scaler is not None and with_optimizer:
                state.put({"loss_scale": dict(vars(self.scaler))})  # the loss is multiplied by this copy

    def load_beside(self, state: StageState, path: Path, with_optimizer: bool) -> None:
        """Load the values that stock's files have no place for, from the stage's own file beside them."""
        engine, read = self.engine, partial(self.engine.checkpoint_engine.load, map_location=HOST)
        saved = beside(path, engine.stage_id, engine.global_steps if with_optimizer else None, read)
        if self.scaler is not None and with_optimizer and "loss_scale" in saved["small"]:
            check_kind(saved["small"]["loss_scale"]["dynamic"], self.scaler)
        take_beside(state, saved, with_optimizer)
        unknown = self.scaler is not None and not engine.fp16_enabled() and "loss_scale" not in saved["small"]
        if self.scaler is not None and unknown and with_optimizer and self.session.view.is_first:
            self.session.note(
                "warning",
                f"{path} has no loss scale, since its job had no recycle.loss_scaling: this job's scale stays at "
                f"{self.scaler.loss_scale:g}",
            )


UNREADABLE = (
    AssertionError,
    AttributeError,  # a file names a class, or a function, that is not in its module
    EOFError,
    ImportError,
    LookupError,
    OSError,
    PickleError,
    RuntimeError,
    TypeError,
    ValueError,
)


@contextmanager
def in_words(folder: Path) -> Iterator[None]:
    """A context in which the checkpoint ``folder`` is read. Errors of stock code, of torch, and for values missing in
    the files become RecycleErrors.
    """
    try:
        yield
    except UNREADABLE as error:
        if isinstance(error, RecycleError | torch.OutOfMemoryError):
            raise
        fits = folders.unfit(error)
        why = f"is of another model ({fits})" if fits else folders.unread(error)
        raise RecycleError(f"load_checkpoint: {folder} {why}; load another checkpoint") from error


class ShareEngine:
    """Stands in for DeepSpeed's checkpoint engine ``stock``, and hands files to ``share`` instead of writing them.
    Nothing raises here: others would wait in stock code for a worker that raises.
    """

    def __init__(self, stock: Any, share: CheckpointShare) -> None:
        self._stock, self._share = stock, share

    def save(self, state_dict: Any, path: str) -> None:
        """Hand over a file that DeepSpeed saves."""
        self._share.save(Path(path), state_dict)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Do nothing: each file makes its folder."""

    def preserves_storage_sharing(self) -> bool:
        """Whether DeepSpeed is to copy a layer's tensors, lest all that shares their memory gets into its file."""
        return not self._share.copies and bool(self._stock.preserves_storage_sharing())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)


class Inventory(ShareEngine):
    """Records which parts of the state are handed over. ``places``: layer numbers, as in file names, to names in the
    module. ``parameters``: the optimizer's, in its order. ``known``: state that has files otherwise.
    """

    def __init__(
        self,
        stock: Any,
        share: CheckpointShare,
        places: Callable[[int], str],
        parameters: list[str],
        known: AbstractSet[str],
    ) -> None:
        super().__init__(stock, share)
        self._places, self._parameters, self._saved = places, parameters, set(known)

    def save(self, state_dict: Any, path: str) -> None:
        """Record a file's contents, and hand it over."""
        name = Path(path).name
        if name.startswith(names.LAYER_FILE_PREFIX):
            layer = int(name.removeprefix(names.LAYER_FILE_PREFIX).partition("-")[0])
            self._saved |= {f"weights/{self._places(layer)}.{key}" for key in state_dict}
        else:
            states = (state_dict["optimizer"] or {}).get("state", {})
            self._saved |= {
                f"optimizer/{parameter}/{kind}"
                for place, parameter in enumerate(self._parameters)
                for kind in states.get(place, ())
            }
        super().save(state_dict, path)

    def left(self, state: StageState, there: AbstractSet[str] = STOCKS) -> dict[str, Any]:
        """Return the state that is in no file yet, without the small parts ``there``; {} if nothing is left."""
        tensors = {name: tensor.detach() for name, tensor in state.tensors().items() if name not in self._saved}
        if any(name.startswith("optimizer/") for name in tensors):
            there = there - {"optimizer"}  # its small part describes these tensors
        small = {name: value for name, value in state.small().items() if value and name not in there | FOLLOWING}
        return {"step": state.step, "small": small, "tensors": tensors} if small or tensors else {}


def file_beside(folder: Path, stage: int) -> Path:
    """Return the path of the file for the values of a stage that stock's files have no place for."""
    return folder / f"recycle_stage_{stage:02d}.pt"


def beside(folder: Path, stage: int, step: int | None, read: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """Read what stock's files of ``stage`` have no place for. ``step`` None: of any step, for the weights alone. Raises
    RecycleError if the file is of another step, as when stock has saved again under the same tag. Raises it too if only
    other stages have such a file: small parts are the same in all, and stages would go on with different ones.
    """
    file = file_beside(folder, stage)
    if file.is_file():
        saved = read(str(file))
        if step is not None and saved["step"] != step:
            raise RecycleError(
                f"load_checkpoint: {file} is of step {saved['step']}, and the checkpoint is of step {step}; "
                "load another one, or only the weights with load_module_only=True"
            )
        return saved
    others = sorted(folder.glob("recycle_stage_*.pt")) if step is not None else []
    if others and read(str(others[0]))["small"]:
        raise RecycleError(
            f"load_checkpoint: {file} is missing, and {others[0].name} is there; copy the checkpoint whole, "
            "load another one, or only the weights with load_module_only=True"
        )
    return {"small": {}, "tensors": {}}


def take_beside(state: StageState, saved: Mapping[str, Any], optimizer: bool) -> None:
    """Load ``saved``, read by :func:`beside`, into the state; without ``optimizer`` only its weights."""
    if optimizer:
        state.put(saved["small"])
    state.fill({name: value for name, value in saved["tensors"].items() if optimizer or name.startswith("weights/")})


class Verified:
    """DeepSpeed's checkpoint engine, which refuses damaged files."""

    def __init__(self, stock: Any) -> None:
        self._stock = stock

    def load(self, path: str, *given: Any, **named: Any) -> Any:
        """Read a file for DeepSpeed. Raises RecycleError if its bytes are not those written."""
        folders.verify(Path(path))
        return self._stock.load(path, *given, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)


def chosen(folder: Path, tag: str | None) -> Path:
    """Return the folder named by ``tag``, else by the file ``latest``. It need not exist."""
    latest = folder / "latest"
    return folders.named_by(latest) if tag is None and latest.is_file() else folder / str(tag)


def check_loadable(path: Path, stages: int, precision: str, sharded: bool) -> None:
    """Raise RecycleError for a checkpoint whose stages or optimizer state do not fit this job. It needs the same number
    of ``stages``: stock would give every stage the first one's optimizer state. It needs the same ``precision``
    ("fp32", "bf16" or "fp16"), and in fp16 the same ``sharded``, that is ZeRO stage 1 or not.
    """
    files = sorted(path.glob(f"{names.MODEL_FILE_PREFIX}*{names.MODEL_FILE_SUFFIX}"))
    if len(files) not in (0, stages):
        raise RecycleError(
            f"load_checkpoint: {path} is of {len(files)} pipeline stages, and this job has {stages}; "
            "DeepSpeed keeps the optimizer's state by stage, and its universal checkpoints need ZeRO; "
            f"use {len(files)} stages (with any number of replicas), or load_module_only=True"
        )
    alone = "load the weights alone with load_module_only=True"
    of_bf16 = any(path.glob(f"{names.BF16_ZERO_FILE_PREFIX}*"))
    of_zero = any(path.glob(f"{names.ZERO_FILE_PREFIX}*"))
    if of_zero and precision == "fp32":
        raise RecycleError(
            f"load_checkpoint: {path} has the optimizer's state in ZeRO's shards, which fp32 jobs can't read; {alone}"
        )
    if files and precision == "fp16" and of_zero != sharded and not of_bf16:
        raise RecycleError(
            f"load_checkpoint: {path} is of a job at ZeRO stage {int(of_zero)}, and this one is at stage "
            f"{int(sharded)}, so the optimizer's state does not fit; set zero_optimization.stage to {int(of_zero)}, or "
            f"{alone}"
        )
    saved = "bf16" if of_bf16 else "fp16" if of_zero or (files and _is_half(files[0])) else "fp32"
    if files and saved != precision:
        raise RecycleError(
            f"load_checkpoint: {path} is of a job in {saved}, and this one is in {precision}, so the optimizer's state "
            f"does not fit; set {PRECISIONS[saved]}, or {alone}"
        )


PRECISIONS = {
    "fp32": "bf16.enabled and fp16.enabled to false",
    "bf16": "bf16.enabled to true",
    "fp16": "fp16.enabled to true",
}


def _is_half(file: Path) -> bool:
    """Whether a model file of stock's has fp16 optimizer state. Reads no tensor."""
    with in_words(file.parent):
        return is_half(torch.load(file, map_location=HOST, mmap=True, weights_only=False)["optimizer"])
