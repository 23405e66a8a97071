"""Checkpoints in Megatron-LM's format "torch_dist", written without collectives, complete if workers are lost.

Stock gathers all ranks' plans, and one rank writes the index. Here each stage's lowest live worker writes the stage's
file with a list of its contents at the end, and the first worker makes the index from these lists once all files are
there. Stock Megatron-LM loads the result with any number of stages and replicas, as do the plugin's jobs, with stock's
code.
"""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from recycle_plugin.adapters.megatron_lm.checkpoint import MegatronFiles
from recycle_plugin.adapters.megatron_lm.in_parts import FORMAT, as_parts
from recycle_plugin.errors import NotSaved
from recycle_plugin.runtime.stage.ports import CheckpointShare
from recycle_plugin.runtime.state.stage_state import StageState

LENGTH = struct.Struct("<Q")  # length of the list at the end of a stage's file


class ShardedFiles(MegatronFiles):
    """The file of one worker's stage, by Megatron's sharded state dict."""

    def gather(self, state: StageState, path: Path, share: CheckpointShare) -> None:
        """Hand over the stage's file, and from the first stage the values common to all, if this worker writes it."""
        if share.turn:
            return
        sharded, common = self._parted(state)
        share.save(path / f"__{self.seat.stage}_0.distcp", {"of stage": list(_items(sharded))})
        if self.seat.stage == 0:
            share.save(path / "common.pt", common)

    def dump(self, contents: Any, file: Any) -> None:
        """Write one file; a stage's items one after the other, and their list."""
        if "of stage" not in contents:
            super().dump(contents, file)
            return
        said, at = [], 0
        for entry, value in contents["of stage"]:
            torch.save(value, made := io.BytesIO())
            file.write(made.getbuffer())
            said.append({**entry, "at": at, "length": (length := made.tell())})
            at += length
        text = json.dumps(said).encode()
        file.write(text + LENGTH.pack(len(text)))

    def complete(self, folder: Path) -> None:
        """Write the index of the checkpoint ``folder``, which has all stages' files. Raises NotSaved."""
        try:
            writer = FileSystemWriter(folder)
            writer.set_up_storage_writer(True)
            writer.finish(*_indexed(folder))
            save_config(CheckpointingConfig("torch_dist", 1), str(folder))
        except OSError as error:
            raise NotSaved(f"the index of {folder}: {error}") from error

    def _parted(self, state: StageState) -> tuple[dict[str, Any], dict[str, Any]]:
        from megatron.training.checkpointing import _build_sharded_state_dict_metadata

        metadata = _build_sharded_state_dict_metadata(self.args)
        about = {"metadata": metadata}
        made = self._contents(state, optim_sd_kwargs=about, model_sd_kwargs=about)
        places = (self.args.pipeline_model_parallel_size, 1), (self.seat.stage, 0)
        made["rng_state"] = ShardedObject("rng_state", made["rng_state"], *places)
        said = {name: value for name, value in metadata.items() if name != "dp_cp_group"}
        if self.in_parts and "optimizer" in made:
            as_parts(made, self.optimizer)
            said |= FORMAT
        made["content_metadata"] = said
        return save_preprocess(made, validate_access_integrity=False)


def _items(sharded: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Any]]:
    """Yield (entry for the index, value) for each item of the state dict that this stage writes."""
    for each in nested_values(sharded):
        where = each.replica_id
        if not is_main_replica(0 if isinstance(where, int) else (*where[:-1], 0)):  # the last place is the replica's
            continue
        if not isinstance(each, ShardedTensor):
            yield {"key": each.unique_key}, [each.data]
            continue
        value = each.data.detach().view((1,) * each.prepend_axis_num + tuple(each.local_shape)).cpu()
        yield (
            {
                "key": each.key,
                "offset": each.global_offset,
                "shape": tuple(value.shape),
                "whole": each.global_shape,
                "dtype": str(value.dtype).removeprefix("torch."),
            },
            value.clone(),  # else all of a buffer is saved of which this is a view
        )


def _indexed(folder: Path) -> tuple[Metadata, list[list[WriteResult]]]:
    """Return the index of the files in ``folder``, in the form that torch's own writer wants."""
    found: dict[str, Any] = {}
    places = []
    for path in sorted(folder.glob("__*_0.distcp")):
        for entry in _said(path):
            key, offset = entry["key"], entry.get("offset")
            if offset is None:
                found[key] = BytesStorageMetadata()
            else:
                kind = TensorProperties(dtype=getattr(torch, entry["dtype"]))
                tensor = found.setdefault(key, TensorStorageMetadata(kind, torch.Size(entry["whole"]), []))
                tensor.chunks.append(ChunkStorageMetadata(torch.Size(offset), torch.Size(entry["shape"])))
            at = _StorageInfo(path.name, entry["at"], entry["length"])
            places.append(WriteResult(MetadataIndex(key, offset), entry["length"], at))
    return Metadata(found), [places]


def _said(path: Path) -> list[dict[str, Any]]:
    with path.open("rb") as file:
        file.seek(-LENGTH.size, io.SEEK_END)
        (length,) = LENGTH.unpack(file.read())
        file.seek(-LENGTH.size - length, io.SEEK_END)
        return json.loads(file.read(length))
