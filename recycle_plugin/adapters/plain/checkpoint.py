"""Checkpoints of a plain job: a folder with one file per stage, written by the stage's lowest live worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from recycle_plugin import folders
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.devices.host import HOST
from recycle_plugin.runtime.stage.ports import CheckpointFormat, CheckpointShare
from recycle_plugin.runtime.state.stage_state import StageState

WHOLE = frozenset(("step", "stages", "kinds", "layers", "small", "tensors"))  # the keys of each file


@dataclass(frozen=True)
class PlainFiles(CheckpointFormat):
    """The checkpoint file of one worker's stage, whose layers are ``module``. ``kinds``: the class names of the
    optimizer and the scheduler, the only ones that can read their state. ``shards``: how many workers hold a seat
    together, each with a file of its own; ``shard``: this worker's number.
    """

    seat: Seat
    stages: int
    module: torch.nn.Module
    kinds: Mapping[str, str]
    shards: int = 1
    shard: int = 0

    def gather(self, state: StageState, path: Path, share: CheckpointShare) -> None:
        """Hand over the stage's file if this worker writes it."""
        if share.turn == 0:
            share.save(path / self._name, self._contents(state))

    def read(self, state: StageState, folder: Path) -> None:
        """Load everything from the checkpoint ``folder``. Raises RecycleError if it is not one of this job."""
        file = folder / self._name
        if (folder / ".metadata").is_file():
            raise RecycleError(
                f"load(): {folder} is one of torch.distributed.checkpoint: give Replicas(…, dcp=True) to load it"
            )
        if not file.is_file():
            raise RecycleError(
                f"load(): {file} is missing; name a folder that save() has written to, and load with as many stages"
            )
        folders.verify(file)
        try:
            contents = torch.load(file, map_location=HOST, weights_only=False)
        except Exception as error:  # torch's, or of any class in the file
            raise RecycleError(f"load(): {file} {folders.unread(error)}; load another one") from error
        if not isinstance(contents, dict) or not contents.keys() >= WHOLE:
            raise RecycleError(f"load(): {file} is no file that save() has written; load another one")
        if contents["stages"] != self.stages:
            raise RecycleError(
                f"load(): {folder} is of {contents['stages']} stages, and this pipeline has {self.stages}; use as many"
            )
        if contents.get("shards", 1) != self.shards:
            raise RecycleError(
                f"load(): {folder} is of a job with shards={contents.get('shards', 1)}, and this one has "
                f"shards={self.shards}; use as many"
            )
        check_kinds(contents["kinds"], self.kinds, folder)
        try:
            self.module.load_state_dict(contents["layers"])
        except RuntimeError as error:
            raise RecycleError(f"load(): {file} is of other layers ({folders.unfit(error)})") from error
        state.put(contents["small"])
        state.fill(contents["tensors"])

    @property
    def _name(self) -> str:
        return f"stage_{self.seat.stage:02d}" + f"_shard_{self.shard}" * (self.shard > 0) + ".pt"

    def _contents(self, state: StageState) -> dict[str, Any]:
        """Return the contents of the stage's file. ``layers`` is the module's state dict, with buffers and frozen
        weights; the other keys have the rest of the state that a step changes.
        """
        rest = {name: tensor.detach() for name, tensor in state.tensors().items() if not name.startswith("weights/")}
        return {
            "step": state.step,
            "stages": self.stages,
            "shards": self.shards,
            "kinds": dict(self.kinds),
            "layers": self.module.state_dict(),
            "small": state.small(),
            "tensors": rest,
        }


def check_kinds(saved: Mapping[str, str], kinds: Mapping[str, str], folder: Path) -> None:
    """Raise RecycleError if the checkpoint ``folder`` was ``saved`` with other classes than ``kinds``."""
    for what, kind in kinds.items():
        if saved.get(what, kind) != kind:
            raise RecycleError(
                f"load(): {folder} is of a job whose {what} is {saved[what]}, and here it is {kind}; give the same"
            )


def chosen(folder: Path, tag: str | None) -> Path:
    """Return a checkpoint's folder, by default that of the one saved last. Raises RecycleError if there is none."""
    latest = folder / "latest"
    if tag is None and not latest.is_file():
        raise RecycleError(
            f"load(): there is no checkpoint in {folder}: {latest} is missing; name the folder that was given to save()"
        )
    return folders.named_by(latest) if tag is None else folder / tag
