"""Checkpoints of replicas in the format of ``torch.distributed.checkpoint`` (DCP), which stock scripts load on any
number of processes.

``dcp.async_save`` runs collectives among all its processes in a second thread, and a lost worker would leave them
hanging. So only DCP's planner and writer are used, in one process each. A worker plans and writes its own part, and
beside it a file that describes the part. The first live worker makes DCP's metadata from these descriptions. The
protocol, also for saving in the background, is in core/worker/checkpoint_saving.py.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol
from zipfile import BadZipFile, ZipFile

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor

from recycle_plugin import folders
from recycle_plugin.adapters.plain.checkpoint import check_kinds
from recycle_plugin.errors import NotSaved, RecycleError
from recycle_plugin.runtime.stage.ports import CheckpointShare
from recycle_plugin.runtime.state.stage_state import StageState

PLAN, METADATA = ".plan", ".metadata"
OURS, OPTIMIZER_STATE, GROUPS = "recycle", "optim.state.", "optim.param_groups."
ELSEWHERE = ("optimizer", "attributes")  # parts of a StageState that a checkpoint has under "optim"


class Weights(Protocol):
    """The model's parameters by name."""

    @property
    def parts(self) -> Mapping[str, torch.Tensor]:
        """All parameters that this worker steps; of a sharded one its local part."""

    @property
    def whole(self) -> Mapping[str, DTensor]:
        """The sharded parameters among them, whole."""


@dataclasses.dataclass
class _Part:
    """A worker's part of a checkpoint: its ``plan``, and the writer's results in ``written`` once it is written."""

    plan: SavePlan
    written: list[Any] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class DistributedFiles:
    """The files of one worker's part of a replica (CheckpointFormat, runtime/stage/ports.py).

    A checkpoint is ``{"model": …, "optim": …}`` as ``torch.distributed.checkpoint.state_dict.get_state_dict`` returns
    it, plus "recycle" with everything else that a step changes. ``weights``: those of ``module``, which ``optimizer``
    steps. ``kinds``: as in PlainFiles. ``shard``: this worker's number in its replica.
    """

    module: nn.Module
    weights: Weights
    optimizer: torch.optim.Optimizer
    kinds: Mapping[str, str]
    shard: int = 0

    def gather(self, state: StageState, path: Path, share: CheckpointShare) -> None:
        """Hand over this worker's file and its description if its replica is the first live one."""
        if share.turn:
            return
        planner = dcp.DefaultSavePlanner()
        planner.set_up_planner(self._contents() | {OURS: self._rest(state)}, None, self.shard == 0)
        if self.shard:
            planner.state_dict = {name: one for name, one in planner.state_dict.items() if isinstance(one, DTensor)}
        part = _Part(planner.create_local_plan())
        share.save(path / f"__{self.shard}_0.distcp", {"part": part, "held": _held(planner.state_dict)})
        share.save(path / f"__{self.shard}{PLAN}", part)

    def dump(self, contents: Any, file: Any) -> None:
        """Write a part with DCP's writer, or a part's description."""
        if isinstance(contents, _Part):
            pickle.dump(contents, file)
            return
        writer = dcp.FileSystemWriter(".", sync_files=False)
        writer.fs = _Into(file)
        plans = writer.prepare_global_plan([SavePlan([])] * self.shard + [contents["part"].plan])
        contents["part"].written = writer.write_data(plans[self.shard], _Held(contents["held"])).value()

    def complete(self, folder: Path) -> None:
        """Write DCP's metadata from all workers' descriptions, and delete those. Raises NotSaved."""
        files = sorted(folder.glob(f"__*{PLAN}"), key=lambda file: int(file.stem.lstrip("_")))
        if (folder / METADATA).exists():
            return
        try:
            parts = [pickle.loads(file.read_bytes()) for file in files]
            planner = dcp.DefaultSavePlanner()
            _, metadata = planner.create_global_plan([part.plan for part in parts])
            dcp.FileSystemWriter(folder).finish(metadata, [part.written for part in parts])
            for file in files:
                file.unlink()
        except OSError as error:
            raise NotSaved(folders.refusal(folder / METADATA, error)) from error

    def read(self, state: StageState, folder: Path) -> None:
        """Load the checkpoint ``folder``, also one of a stock script. Raises RecycleError if it does not fit."""
        if not (folder / METADATA).is_file():
            raise RecycleError(
                f"load(): {folder / METADATA} is missing; name a folder that save() has written to, of a job whose "
                "checkpoints have this format too"
            )
        with _in_words(folder):
            metadata = dcp.FileSystemReader(folder).read_metadata()
        groups = _groups(metadata, folder)
        ours: dict[str, Any] = {OURS: b"", "optim": {"param_groups": [{"params": b""}] * groups}}
        _load(ours, folder, metadata)
        found = torch.load(io.BytesIO(ours[OURS]), weights_only=True) if ours[OURS] else {"kinds": {}, "rest": {}}
        check_kinds(found["kinds"], self.kinds, folder)
        _check_model(self.module.state_dict(), metadata, folder)
        self._check_groups([group["params"] for group in ours["optim"]["param_groups"]], folder)
        self._make_room(metadata)
        contents = self._contents()
        _load(contents, folder, metadata)
        self._take(contents["optim"])
        state.put(found["rest"])

    def _names(self) -> dict[torch.Tensor, str]:
        return {part: name for name, part in self.weights.parts.items()}

    def _check_groups(self, saved: list[Any], folder: Path) -> None:
        """Raise RecycleError if the parameter groups differ. ``saved``: each group's names, [] without optimizer."""
        groups, name_of = self.optimizer.param_groups, self._names()
        if saved and len(saved) != len(groups):
            raise RecycleError(
                f"load(): {folder} is of an optimizer with {len(saved)} parameter group{'s' * (len(saved) > 1)}, and "
                f"here it has {len(groups)}; give the same"
            )
        for number, (names, group) in enumerate(zip(saved, groups)):
            if others := {*names} ^ {name_of[each] for each in group["params"]}:
                raise RecycleError(
                    f"load(): {folder} is of an optimizer with other parameters: {min(others)} is in group {number} of "
                    f"{'that one' if min(others) in names else 'this one'} only; give the same"
                )

    def _contents(self) -> dict[str, Any]:
        """Return the model's and the optimizer's state in DCP's form, without copying tensors."""
        name_of = self._names()
        groups = [
            group | {"params": [name_of[each] for each in group["params"]]} for group in self.optimizer.param_groups
        ]
        states = {
            name_of[part]: {kind: self._as_whole(name_of[part], value) for kind, value in values.items()}
            for part, values in self.optimizer.state.items()
        }
        return {"model": self.module.state_dict(), "optim": {"state": states, "param_groups": groups}}

    def _as_whole(self, name: str, value: Any) -> Any:
        """Return a weight's optimizer state as a local part of the whole weight's state, if the weight is sharded."""
        whole, part = self.weights.whole.get(name), self.weights.parts[name]
        if whole is None or not torch.is_tensor(value) or value.shape != part.shape:
            return value
        mesh, placements = whole.device_mesh, whole.placements
        return DTensor.from_local(value, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())

    def _rest(self, state: StageState) -> bytes:
        """Return the rest of the state that a step changes, in a form that DCP does not interpret."""
        rest = {name: value for name, value in state.small().items() if name not in ELSEWHERE}
        return _saved({"kinds": dict(self.kinds), "rest": rest})

    def _make_room(self, metadata: Metadata) -> None:
        """Give the optimizer a tensor of any values for each one that the checkpoint has, to load into."""
        self.optimizer.state.clear()
        for key, one in metadata.state_dict_metadata.items():
            name, _, kind = key.removeprefix(OPTIMIZER_STATE).rpartition(".")
            part = self.weights.parts.get(name)
            if not key.startswith(OPTIMIZER_STATE) or part is None:
                continue
            room = None
            if isinstance(one, TensorStorageMetadata):
                alike = one.size == self.weights.whole.get(name, part).shape
                dtype = one.properties.dtype
                room = torch.zeros_like(part, dtype=dtype) if alike else torch.zeros(one.size, dtype=dtype)
            self.optimizer.state[part][kind] = room

    def _take(self, read: Mapping[str, Any]) -> None:
        """Take those values of the optimizer that are no tensors."""
        for group, found in zip(self.optimizer.param_groups, read["param_groups"], strict=True):
            group.update({name: value for name, value in found.items() if name != "params"})
        for name, values in read["state"].items():
            kept = self.optimizer.state[self.weights.parts[name]]
            kept.update({kind: value for kind, value in values.items() if not torch.is_tensor(value)})


@dataclasses.dataclass(frozen=True)
class Unsharded:
    """The weights of a worker that has all of them whole."""

    parts: Mapping[str, torch.Tensor]
    whole: Mapping[str, DTensor] = dataclasses.field(default_factory=dict)


# --- DCP's own planner, writer and reader, in one process ------------------------------------------------------------


class _Held(dcp.DefaultSavePlanner):
    """Hands DCP's writer the tensor or bytes in ``held`` for each item of a plan."""

    def __init__(self, held: Mapping[str, torch.Tensor | bytes]) -> None:
        super().__init__()
        self._held = held

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        found = self._held[write_item.index.fqn]
        return io.BytesIO(found) if isinstance(found, bytes) else found


class _Into(FileSystem):
    """A file system whose only file is open already."""

    def __init__(self, file: Any) -> None:
        self._file = file

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        """Yield the file, which its owner closes."""
        yield _Stream(self._file)


class _Stream:
    """A write-only file that counts its bytes."""

    def __init__(self, file: Any) -> None:
        self._file, self._place = file, 0

    def write(self, data: Any) -> int:
        self._file.write(data)
        size = memoryview(data).nbytes
        self._place += size
        return size

    def tell(self) -> int:
        """Return how many bytes were written."""
        return self._place

    def flush(self) -> None:
        """Do nothing: the file's owner flushes it."""

    def close(self) -> None:
        """Do nothing: the file's owner closes it."""


class _CheckedReader(dcp.FileSystemReader):
    """DCP's reader, which also checks the CRC of each item."""

    def _slice_file(self, file: Any, sinfo: Any) -> io.BytesIO:
        file.seek(sinfo.offset)
        found = io.BytesIO(file.read(sinfo.length))
        with ZipFile(found) as item:
            if item.testzip() is not None:
                raise BadZipFile(f"the CRC of the item at byte {sinfo.offset} is wrong")
        found.seek(0)
        return found


def _load(contents: dict[str, Any], folder: Path, metadata: Metadata) -> None:
    """Load the entries that both ``contents`` and the checkpoint have, tensors in place, without a collective."""
    reader, planner = _CheckedReader(folder), dcp.DefaultLoadPlanner(allow_partial_load=True)
    with _in_words(folder):
        planner.set_up_planner(contents, metadata, True)
        reader.set_up_storage_reader(metadata, True)
        plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
        reader.read_data(plan, planner).wait()


@contextmanager
def _in_words(folder: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # DCP's, or of any class in the file
        raise RecycleError(f"load(): {folder} {folders.unread(error)}; load another one") from error


def _check_model(model: Mapping[str, Any], metadata: Metadata, folder: Path) -> None:
    for name, tensor in model.items():
        saved = metadata.state_dict_metadata.get(f"model.{name}")
        if not isinstance(saved, TensorStorageMetadata):
            raise RecycleError(f"load(): {folder} is of another model, without model.{name}")
        if saved.size != tensor.shape:
            raise RecycleError(
                f"load(): {folder} is of another model: its {name} has shape {tuple(saved.size)}, and here it is "
                f"{tuple(tensor.shape)}"
            )
        if saved.properties.dtype != tensor.dtype:
            raise RecycleError(
                f"load(): {folder} is of another model: its {name} is {saved.properties.dtype}, and here it is "
                f"{tensor.dtype}"
            )


def _groups(metadata: Metadata, folder: Path) -> int:
    """Return the number of the optimizer's parameter groups. Raises RecycleError if their settings are by parameter."""
    keys = metadata.state_dict_metadata
    numbers = {key.removeprefix(GROUPS).partition(".")[0] for key in keys if key.startswith(GROUPS)}
    if any(f"{GROUPS}{number}.params" not in keys for number in numbers):
        raise RecycleError(
            f"load(): {folder} has the optimizer's settings by parameter instead of by group, as with "
            "flatten_optimizer_state_dict=True, which is not read; save it without that option"
        )
    return len(numbers)


def _held(contents: Mapping[str, Any]) -> dict[str, torch.Tensor | bytes]:
    """Return the data to write, by DCP's names: this worker's part of a tensor, or bytes."""
    return {
        name: (one.to_local() if isinstance(one, DTensor) else one).detach() if torch.is_tensor(one) else _saved(one)
        for name, one in contents.items()
    }


def _saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()
