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
