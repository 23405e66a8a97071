"""What torch.distributed.checkpoint (DCP) has written, or is to write, and what of it can't be."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from recycle_plugin.adapters.plain.distributed_files import DistributedFiles, Unsharded
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.collectives.calls import save


class Named(nn.Module):
    """Of one layer, whose name is no number."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(3, 2)


@pytest.mark.parametrize("model", (Named(), nn.Sequential(nn.Linear(3, 2))))
def test_an_optimizers_settings_by_parameter_are_refused_before_anything_is_loaded(model, tmp_path):
    optimizer = torch.optim.Adam(model.parameters())
    weights, states = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    dcp.save({"model": weights, "optim": states}, checkpoint_id=tmp_path / "flat")
    files = DistributedFiles(model, Unsharded(dict(model.named_parameters())), optimizer, {})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(RecycleError, match="has the optimizer's settings by parameter instead of by group"):
        files.read(SimpleNamespace(), tmp_path / "flat")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    "state, of",
    (
        ({"zero_stage": 1, "single_partition_of_fp32_groups": [torch.ones(2)]}, "ZeRO's"),
        ({"clip_grad": 0.0, "single_partition_of_fp32_groups": [torch.ones(2)]}, "DeepSpeed's bf16"),
    ),
)
def test_one_ranks_part_of_flat_groups_is_refused_before_anything_is_saved(state, of, tmp_path):
    pytest.importorskip("deepspeed")
    with pytest.raises(RecycleError, match=rf"would write one rank's part of the state of {of} optimizer: call engine"):
        save(None, dcp.save, {"model": {"weight": torch.ones(2)}, "optimizer": state}, checkpoint_id=tmp_path / "dcp")
    assert not (tmp_path / "dcp").exists()
