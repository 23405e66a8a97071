"""A job that switches the plugin on and is started without it hears so, in whichever order it imports what it needs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from recycle_plugin.adapters.unlaunched import CONFIG, LAUNCHED, MEGATRON_SAID, SAID, _enables

ASKED_FIRST = "torch, importlib.util; importlib.util.find_spec('deepspeed.runtime.config')"  # as transformers does
SCRIPT = """
import {first}
from deepspeed.runtime.config import DeepSpeedConfig
DeepSpeedConfig({{"train_batch_size": 1, "recycle": {section}}})
"""


def test_a_file_that_is_no_section_switches_nothing_on(tmp_path: Path) -> None:
    for text in ("{", "[]", "[" * 100_000):
        (tmp_path / "r.json").write_text(text)
        assert not _enables(str(tmp_path / "r.json"))


@pytest.mark.parametrize(
    "first, section, variables, said",
    [
        ("deepspeed", {"enabled": True}, {}, 1),
        ("torch", {"enabled": True}, {}, 1),
        (ASKED_FIRST, {"enabled": True}, {}, 1),
        ("deepspeed", {"enabled": True}, {"RANK": "1"}, 0),
        ("deepspeed", {"enabled": False}, {}, 0),
        ("deepspeed", {"enabled": True}, {LAUNCHED: "127.0.0.1:1"}, 0),
    ],
    ids=("deepspeed first", "torch first", "asked for first", "another rank", "switched off", "launched"),
)
def test_it_is_said_once(first: str, section: dict, variables: dict[str, str], said: int) -> None:
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "WORLD_SIZE": "1", **variables}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(first=first, section=section)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines().count(SAID) == said


@pytest.mark.parametrize(
    "text, rank, said",
    [
        ('{"enabled": true}', "0", 1),
        ('{"recycle": {"enabled": true}}', "0", 1),
        ('{"enabled": true}', "1", 0),
        ('{"enabled": false}', "0", 0),
        ("[", "0", 0),
    ],
)
def test_a_megatron_lm_job_that_reads_no_settings_says_so(tmp_path: Path, text: str, rank: str, said: int) -> None:
    """Its package is empty here: the line comes when the training loop is imported."""
    (package := tmp_path / "megatron" / "training").mkdir(parents=True)
    for file in (package.parent / "__init__.py", package / "__init__.py", package / "training.py"):
        file.touch()
    (tmp_path / "recycle.json").write_text(text)
    environment = {name: value for name, value in os.environ.items() if name != LAUNCHED} | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
        CONFIG: str(tmp_path / "recycle.json"),
        "RANK": rank,
    }
    script = "import torch, megatron.training.training"
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines().count(MEGATRON_SAID) == said
