"""GPT, converted layers and emulated layers in DeepSpeed's own pipeline engine, two stages, two processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("deepspeed")
pytest.importorskip("megatron.core")


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> list[dict]:
    """What pipeline_job.py printed, by rank."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    environment["TORCH_EXTENSIONS_DIR"] = str(tmp_path_factory.mktemp("extensions"))
    job = Path(__file__).with_name("pipeline_job.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(job)]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=110)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
    lines = [line[line.index("REPORT ") + 7 :] for line in output.splitlines() if "REPORT " in line]
    assert process.returncode == 0 and len(lines) == 2, output[-4000:]
    assert not os.listdir(environment["TORCH_EXTENSIONS_DIR"]), "DeepSpeed has built an extension"
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
