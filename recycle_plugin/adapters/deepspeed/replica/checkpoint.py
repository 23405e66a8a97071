"""Stock checkpoints of sharded replicas, complete even if replicas are missing.

A checkpoint has the files of one replica's ranks: the ranks of the first live replica write what stock's ranks 0, 1, …
write, each the file of its shard. With ZeRO, the optimizer's state is in stock's ZeRO files. Stock DeepSpeed loads the
checkpoint on as many ranks as one replica has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine

from recycle_plugin import folders
from recycle_plugin.adapters.deepspeed.checkpoint import ShareEngine
from recycle_plugin.adapters.deepspeed.rank0 import first_for_stock, replaced
from recycle_plugin.errors import NotSaved, RecycleError
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.stage.ports import CheckpointFormat, CheckpointShare
from recycle_plugin.runtime.state.stage_state import StageState


@contextmanager
def _partitioned(engine: Any) -> Iterator[None]:
    """A context in which ZeRO stage 3's small parameters are partitioned too, as in stock's files."""
    if engine._optimizer_has_ckpt_event_prologue():
        engine.optimizer.checkpoint_event_prologue()
    try:
        yield
    finally:  # also if a disk refuses a file: the script may go on
        if engine._optimizer_has_ckpt_event_epilogue():
            engine.optimizer.checkpoint_event_epilogue()


def _add_scripts(engine: Any, folder: Path) -> None:
    """Put stock's scripts for its files into ``folder``. Raises NotSaved."""
    try:
        DeepSpeedEngine._copy_recovery_script(engine, str(folder))
    except OSError as error:
        raise NotSaved(folders.refusal(folder, error)) from error


@dataclass(frozen=True)
class ReplicaFiles(CheckpointFormat):
    """The files of a checkpoint that one rank writes, by stock code, which is methods of ``engine``. ``stock``:
    DeepSpeed's checkpoint engine. ``client_state``, ``exclude_frozen_parameters``: as scripts give them to
    ``save_checkpoint``.
    """

    engine: Any
    stock: Any
    session: Session
    shard: int
    client_state: Mapping[str, Any] = field(default_factory=dict)
    exclude_frozen_parameters: bool = False

    def gather(self, state: StageState, path: Path, share: CheckpointShare) -> None:
        """Hand over the rank's files if it is of the first live replica. Raises NotSaved."""
        engine, folder = self.engine, str(path.parent)
        if share.turn:
            return
        with (
            replaced(engine, checkpoint_engine=ShareEngine(self.stock, share)),
            self.session.thread.undisturbed(),
            engine.shards.as_stock(),
            _partitioned(engine),
            first_for_stock(engine, self.shard == 0),
        ):
            engine._create_checkpoint_file(folder, path.name, False)
            engine._save_checkpoint(folder, path.name, dict(self.client_state), self.exclude_frozen_parameters)
            if engine.save_zero_checkpoint:
                engine._save_zero_checkpoint(folder, path.name)
        share.check()
        if self.shard == 0 and engine.save_zero_checkpoint:
            _add_scripts(engine, path.parent)

    def dump(self, contents: Any, file: Any) -> None:
        self.stock.save(contents, file)

    def read(self, state: StageState, folder: Path) -> None:
        """Raise RecycleError: no stage of such a job is replayed, since its log is refused."""
        raise RecycleError("recycle.log with recycle.replicas is not supported yet: remove recycle.log")


@dataclass(frozen=True)
class WeightsFile(ReplicaFiles):
    """One file of all weights, as in ``save_16bit_model``, gathered and written in the first live replica."""

    def gather(self, state: StageState, path: Path, share: CheckpointShare) -> None:
        """Hand over the file ``path`` if this rank writes it."""
        engine = self.engine
        if share.turn:
            return
        with self.session.thread.undisturbed(), first_for_stock(engine, self.shard == 0):
            if engine.zero_optimization_partition_weights():
                weights = DeepSpeedEngine._zero3_consolidated_16bit_state_dict(engine, self.exclude_frozen_parameters)
            else:
                weights = engine.module_state_dict(exclude_frozen_parameters=self.exclude_frozen_parameters)
        if self.shard == 0:
            share.save(path, weights)
