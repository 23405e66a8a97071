"""Checkpoints of a plain job: a folder with a file for each stage, which the stage's lowest live worker writes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from recycle_plugin import folders
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.devices.host import HOST
from recycle_plugin.runtime.stage.ports import Reach
from recycle_plugin.runtime.state.stage_state import StageState

WHOLE = frozenset(("step", "stages", "kinds", "layers", "small", "tensors"))  # what each file has


@dataclass(frozen=True)
class StageFiles:
    """Writes and reads the file of one worker's stage, whose layers are in ``module`` (runtime/stage/ports.py).

    ``kinds``: the names of the classes of what else has a state, which says nothing to others; ``shards``: workers that
    hold a seat together, each of which has a file of its own, and which of them this one is.
    """

    session: Session
    seat: Seat
    stages: int
    module: torch.nn.Module
    kinds: Mapping[str, str]
    shards: int = 1
    shard: int = 0

    def write(self, state: StageState, folder: Path, tag: str, reach: Reach) -> None:
        """Write the stage's file, if this worker does so; it is on the disk when this returns.  Raises NotSaved."""
        if self._writes:
            self._save(self._contents(state), folder / tag, reach)

    def copy(self, state: StageState, folder: Path, tag: str, reach: Reach) -> Callable[[], None]:
        """Copy the state now, if this worker writes the stage's file; the result writes it, and raises NotSaved."""
        if not self._writes:
            return lambda: None
        contents = copy.deepcopy(self._contents(state))
        return lambda: self._save(contents, folder / tag, reach)

    def read(self, state: StageState, folder: Path) -> None:
        """Load everything from the checkpoint ``folder``.  Raises RecycleError where it is not one of this job."""
        file = folder / self._name
        if not file.is_file():
            raise RecycleError(
                f"load(): {file} is missing; name a folder that save() has written to, and load with as many stages"
            )
        folders.verify(file)
        try:
            contents = torch.load(file, map_location=HOST, weights_only=False)
        except Exception as error:  # torch's, or of whatever class is in it
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
        for what, kind in self.kinds.items():
            if contents["kinds"][what] != kind:
                raise RecycleError(
                    f"load(): {folder} is of a job whose {what} is {contents['kinds'][what]}, and here it is {kind}; "
                    "give the same"
                )
        try:
            self.module.load_state_dict(contents["layers"])
        except RuntimeError as error:
            raise RecycleError(f"load(): {file} is of other layers ({folders.unfit(error)})") from error
        state.put(contents["small"])
        state.fill(contents["tensors"])

    @property
    def _writes(self) -> bool:
        """Whether this worker writes the file of its stage: one does."""
        return self.session.roster.first_of(self.seat.stage, self.shard).worker == self.session.worker

    @property
    def _name(self) -> str:
        return f"stage_{self.seat.stage:02d}" + f"_shard_{self.shard}" * (self.shard > 0) + ".pt"

    def _contents(self, state: StageState) -> dict[str, Any]:
        """The contents of the stage's file.

        ``layers``: as the stage's module has them, buffers and frozen weights too; the rest is what else a step
        changes.
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

    def _save(self, contents: dict[str, Any], folder: Path, reach: Reach) -> None:
        folders.make(folder)
        folders.write(folder / self._name, partial(torch.save, contents))
        reach("checkpoint.file")


def chosen(folder: Path, tag: str | None) -> Path:
    """The folder of the checkpoint ``folder``/``tag``, or of the one that was saved last.  Raises RecycleError if none
    was.
    """
    latest = folder / "latest"
    if tag is None and not latest.is_file():
        raise RecycleError(
            f"load(): there is no checkpoint in {folder}: {latest} is missing; name the folder that was given to save()"
        )
    return folder / (latest.read_text().strip() if tag is None else tag)
