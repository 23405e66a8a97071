"""GPT, converted layers and emulated layers in DeepSpeed's own pipeline engine, two stages, two processes."""

from __future__ import annotations

import json
import os

import pytest

from tests.support.cluster import Run

pytest.importorskip("deepspeed")
pytest.importorskip("megatron.core")


@pytest.fixture(scope="module")
def reports(server, tmp_path_factory) -> list[dict]:
    """What pipeline_job.py printed, by rank."""
    extensions = tmp_path_factory.mktemp("extensions")
    job = Run(
        server,
        tmp_path_factory.mktemp("job"),
        2,
        "",
        [],
        plugin="tests.torch.pipeline_job",
        launcher="tasks",
        TORCH_EXTENSIONS_DIR=str(extensions),
    )
    try:
        result = job.finish(timeout_s=110)
    finally:
        left = job.clean()
    lines = [line[line.index("REPORT ") + 7 :] for line in result.output.splitlines() if "REPORT " in line]
    assert result.code == 0 and len(lines) == 2 and not left, result.output[-4000:]
    assert not os.listdir(extensions), "DeepSpeed has built an extension"
    return [json.loads(line) for line in lines]


@pytest.mark.processes
@pytest.mark.parametrize("suffix", ("", ", checkpointed"))
def test_converted_layers_are_stock_outside_of_the_plugins_own_forwards(reports, suffix):
    for report in reports:
        assert report["stock" + suffix] == report["converted" + suffix]
    losses = reports[0]["stock" + suffix]["losses"]
    assert losses[-1] < losses[0]


@pytest.mark.processes
def test_emulated_layers_train(reports):
    for report in reports:
        losses = report["emulated"]["losses"]
        assert losses[-1] < losses[0]
