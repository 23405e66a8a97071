"""What is not supported, or is wrong on this machine, ends in one clear line: no traceback, no hang, nothing left."""

from __future__ import annotations

import shutil
import socket
import sys
from pathlib import Path

import pytest

from tests.support.jobs import Shape, assert_one_line

SCRIPT = "tests/jobs/refused.py"
PAIR = Shape(replicas=2, stages=1)

CASES = {
    "unknown key": "recycle.spilt_backward: no such key; did you mean split_backward?",
    "misspelt section": '"Recyle" in the DeepSpeed config: no such section; did you mean "recycle"?',
    "no batch size": "the DeepSpeed config has neither train_batch_size nor train_micro_batch_size_per_gpu: write one "
    "of the two",
    "another backend": 'process groups over another are not supported yet: write "gloo" where your script names a '
    "backend, or leave it out",
    "one replica": "data parallelism is 1",
    "iterable dataset": "training_data is a Endless, which cannot be read by index: give a map-style dataset",
    "ZeRO 1": "zero_optimization.stage 1 shards the optimizer state",
    "ZeRO 2": "zero_optimization.stage 2 does not work with pipelines",
    "ZeRO 3": "zero_optimization.stage 3 does not work with pipelines",
    "tensor parallelism": "tensor parallelism above 1 is not supported yet",
    "tied layers": "the layers tied as 'both' name different weights, weight and bias, so stages would add up "
    "gradients of different weights",
    "fp16": "fp16.enabled: DeepSpeed has no fp16 on this device, cpu; set bf16.enabled to true instead",
    "universal checkpoint": "checkpoint.load_universal needs the files of a ZeRO optimizer",
    "placement unknown at the start": 'recycle.placement "spread" came too late, ranks had been assigned before this '
    "config was read: put it into a file",
    "Hugging Face": 'recycle.batch "constant" with Hugging Face\'s Accelerate, which draws a fixed number of '
    "micro-batches for each step: leave it out",
    "two engines": "deepspeed.initialize was called twice with recycle.enabled: only one engine per process",
    "no pipeline": "recycle.enabled needs a deepspeed.pipe.PipelineModule",
}


def options(tmp_path: Path, case: str) -> dict:
    return {"script": SCRIPT, "RECYCLE_TEST_CASE": case, "RECYCLE_TEST_FOLDER": str(tmp_path / "run0")}


@pytest.mark.parametrize("case", CASES)
def test_refused(launch, tmp_path, case):
    assert_one_line(launch(shape=PAIR, **options(tmp_path, case)).finish(), CASES[case])


def test_a_script_that_names_nccl_gets_groups_that_lose_members(launch, tmp_path):
    result = launch(shape=PAIR, **options(tmp_path, "nccl")).finish()
    assert result.code == 0 and "step: 1: loss" in result.output, result.output[-3000:]


def test_more_stages_than_layers(launch, tmp_path):
    assert_one_line(
        launch(**options(tmp_path, "more stages than layers")).finish(), "the pipeline has 2 stages for 1 layers"
    )


def test_more_stages_than_layers_in_the_composed_job(launch):
    assert_one_line(launch(shape=Shape(stages=4, layers=1)).finish(), "topology.stages: 4 stages for 3 layers")


def test_unknown_key_in_the_composed_job(launch):
    assert_one_line(launch("+recycle.spilt_backward=false").finish(), "did you mean split_backward?")


def test_no_compiler(launch, tmp_path):
    only_python = str(Path(sys.executable).parent)
    result = launch(shape=PAIR, PATH=only_python, **options(tmp_path, "no compiler")).finish()
    assert_one_line(result, "there is no C++ compiler; set optimizer.params.torch_adam to true")


@pytest.mark.skipif(not shutil.which("g++"), reason="needs a compiler")
def test_stale_extension_lock(launch, tmp_path):
    lock = tmp_path / "extensions" / "py311_cpu" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    result = launch(
        shape=PAIR, TORCH_EXTENSIONS_DIR=str(tmp_path / "extensions"), **options(tmp_path, "stale lock")
    ).finish()
    assert_one_line(result, f"{lock} is the lock of a DeepSpeed extension whose build died")


@pytest.mark.real_launcher
def test_busy_port(launch):
    with socket.create_server(("127.0.0.1", 0)) as busy:
        run = launch(port=busy.getsockname()[1])
        assert_one_line(run.finish(), f"master port {run.port} cannot be used")
