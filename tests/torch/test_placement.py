"""Which PipelineModules ranks may be dealt out for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology

from recycle_plugin.adapters.deepspeed.engine_checks import check_placement
from recycle_plugin.errors import RecycleError


def module(topology: ProcessTopology) -> SimpleNamespace:
    return SimpleNamespace(topology=lambda: topology)


@pytest.mark.parametrize(
    "topology", (PipeDataParallelTopology(2, 3), PipeModelDataParallelTopology(num_pp=2, num_mp=1, num_dp=3))
)
def test_deepspeeds_own_topologies(topology):
    check_placement("spread", module(topology), "spread")
    check_placement("deepspeed", module(topology), "deepspeed")
    with pytest.raises(
        RecycleError, match=r"--deepspeed_config; or leave placement out, and give PipelineModule .*dims=\[3, 2\]"
    ):
        check_placement("spread", module(topology), "deepspeed")


def test_a_topology_that_spreads_by_itself():
    with pytest.raises(RecycleError, match="the replicas of a stage are not neighbouring ranks: leave one of"):
        check_placement("spread", module(ProcessTopology(axes=["data", "pipe"], dims=[3, 2])), "spread")
