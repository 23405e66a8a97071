"""Checkpoints of replicas in the format of ``torch.distributed.checkpoint`` (DCP), which stock scripts load, on any
number of processes.

``dcp.async_save`` itself needs all of its processes in collectives of a thread beside the one that trains, which a lost
worker would leave hanging.  So only DCP's planner and its writer are used, in one process each: a worker plans and
writes its own part, with what it wrote and where in a file beside it, and the first live worker makes DCP's metadata of
these (the protocol around it is core/worker/checkpoint_saving.py's, also in the background).
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
ELSEWHERE = ("optimizer", "attributes")  # parts of a state that are under "optim"


class Weights(Protocol):
    """The model's parameters by name: ``parts``, what this worker steps, and ``whole``, of which those are a part."""

    @property
    def parts(self) -> Mapping[str, torch.Tensor]:
        """All of them; of a sharded one what this worker has of it."""

    @property
    def whole(self) -> Mapping[str, DTensor]:
        """Those that are sharded."""


@dataclasses.dataclass
class _Part:
    """A worker's part of a checkpoint: its ``plan``, and what its writer has ``written``, once it has."""

    plan: SavePlan
    written: list[Any] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class DistributedFiles:
    """The files of one worker's part of a replica (a CheckpointFormat of runtime/stage/ports.py).

    A checkpoint is ``{"model": …, "optim": …}``, as ``torch.distributed.checkpoint.state_dict.get_state_dict`` gives
    them, and "recycle": what else a step changes.  ``weights``: of ``module``, stepped by ``optimizer``; ``kinds``: as
    of PlainFiles; ``shard``: this worker's among those of its replica.
    """

    module: nn.Module
    weights: Weights
    optimizer: torch.optim.Optimizer
    kinds: Mapping[str, str]
    shard: int = 0

    def gather(self, state: StageState, path: Path, share: CheckpointShare) -> None:
        """Hand over this worker's file and what describes it, if its replica is the first that is there."""
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
        """Write a part by DCP's writer, or what it has written."""
        if isinstance(contents, _Part):
            pickle.dump(contents, file)
            return
        writer = dcp.FileSystemWriter(".", sync_files=False)
        writer.fs = _Into(file)
        plans = writer.prepare_global_plan([SavePlan([])] * self.shard + [contents["part"].plan])
        contents["part"].written = writer.write_data(plans[self.shard], _Held(contents["held"])).value()

    def complete(self, folder: Path) -> None:
        """Write DCP's metadata of all workers' parts.  Raises NotSaved."""
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
        """Load the checkpoint ``folder``, of any number of processes, also one of a stock script.  Raises RecycleError
        where it is none, or of another job.
        """
        if not (folder / METADATA).is_file():
            raise RecycleError(
                f"load(): {folder / METADATA} is missing; name a folder that save() has written to, of a job whose "
                "checkpoints have this format too"
            )
        with _in_words(folder):
            metadata = dcp.FileSystemReader(folder).read_metadata()
        ours: dict[str, Any] = {OURS: b"", "optim": {"param_groups": [{"params": b""}] * _groups(metadata)}}
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
        """What the weights are called that the optimizer steps."""
        return {part: name for name, part in self.weights.parts.items()}

    def _check_groups(self, saved: list[Any], folder: Path) -> None:
        """Raise RecycleError where a checkpoint is of other parameter groups; ``saved``: the names of each, none where
        it has no optimizer.
        """
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
                    f"{'that one' if min(others) in names else 'this one'} alone; give the same"
                )

    def _contents(self) -> dict[str, Any]:
        """The model and its optimizer, as DCP is to know them; tensors are those that are trained."""
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
        """What the optimizer keeps for a weight, as the part that it is of what that is for the whole weight."""
        whole, part = self.weights.whole.get(name), self.weights.parts[name]
        if whole is None or not torch.is_tensor(value) or value.shape != part.shape:
            return value
        mesh, placements = whole.device_mesh, whole.placements
        return DTensor.from_local(value, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())

    def _rest(self, state: StageState) -> bytes:
        """What else a step changes, which nobody else needs to know."""
        rest = {name: value for name, value in state.small().items() if name not in ELSEWHERE}
        return _saved({"kinds": dict(self.kinds), "rest": rest})

    def _make_room(self, metadata: Metadata) -> None:
        """Have the optimizer keep what a checkpoint has for it, of whatever values."""
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
        """Take what was read of the optimizer and is no tensor."""
        for group, found in zip(self.optimizer.param_groups, read["param_groups"], strict=True):
            group.update({name: value for name, value in found.items() if name != "params"})
        for name, values in read["state"].items():
            kept = self.optimizer.state[self.weights.parts[name]]
            kept.update({kind: value for kind, value in values.items() if not torch.is_tensor(value)})


@dataclasses.dataclass(frozen=True)
class Unsharded:
    """The weights of a worker that has all of them."""

    parts: Mapping[str, torch.Tensor]
    whole: Mapping[str, DTensor] = dataclasses.field(default_factory=dict)


# --- DCP's own planner, writer and reader, in one process ------------------------------------------------------------


class _Held(dcp.DefaultSavePlanner):
    """Gives DCP's writer what is ``held`` for each item of a plan: a tensor, or bytes."""

    def __init__(self, held: Mapping[str, torch.Tensor | bytes]) -> None:
        super().__init__()
        self._held = held

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """What is held for one item."""
        found = self._held[write_item.index.fqn]
        return io.BytesIO(found) if isinstance(found, bytes) else found


class _Into(FileSystem):
    """The only file that DCP's writer opens, which is open already."""

    def __init__(self, file: Any) -> None:
        self._file = file

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        """The file, which somebody else closes."""
        yield _Stream(self._file)


class _Stream:
    """A file that only writes, and knows where it is."""

    def __init__(self, file: Any) -> None:
        self._file, self._place = file, 0

    def write(self, data: Any) -> int:
        """Write all of ``data``."""
        self._file.write(data)
        size = memoryview(data).nbytes
        self._place += size
        return size

    def tell(self) -> int:
        """How many bytes were written."""
        return self._place

    def flush(self) -> None:
        """Nothing: who has opened the file flushes it."""

    def close(self) -> None:
        """Nothing: who has opened the file closes it."""


class _CheckedReader(dcp.FileSystemReader):
    """DCP's reader, which looks at the CRCs of what it reads."""

    def _slice_file(self, file: Any, sinfo: Any) -> io.BytesIO:
        file.seek(sinfo.offset)
        found = io.BytesIO(file.read(sinfo.length))
        with ZipFile(found) as item:
            if item.testzip() is not None:
                raise BadZipFile(f"the CRC of what is at {sinfo.offset} is another one")
        found.seek(0)
        return found


def _load(contents: dict[str, Any], folder: Path, metadata: Metadata) -> None:
    """Load what is in ``contents``, and in the checkpoint, tensors in place; without the other processes."""
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
    except Exception as error:  # DCP's, or of whatever class is in it
        raise RecycleError(f"load(): {folder} {folders.unread(error)}; load another one") from error


def _check_model(model: Mapping[str, Any], metadata: Metadata, folder: Path) -> None:
    """Raise RecycleError where a checkpoint is of another model."""
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


def _groups(metadata: Metadata) -> int:
    """How many parameter groups a checkpoint's optimizer has."""
    keys = (
        key.removeprefix(GROUPS).partition(".")[0] for key in metadata.state_dict_metadata if key.startswith(GROUPS)
    )
    return max((int(number) + 1 for number in keys), default=0)


def _held(contents: Mapping[str, Any]) -> dict[str, torch.Tensor | bytes]:
    """What is to be written, by DCP's name of it: this worker's part of a tensor, or bytes."""
    return {
        name: (one.to_local() if isinstance(one, DTensor) else one).detach() if torch.is_tensor(one) else _saved(one)
        for name, one in contents.items()
    }


def _saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()
