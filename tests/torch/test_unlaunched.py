"""A job that switches the plugin on and is started without it hears so, in whichever order it imports what it needs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from recycle_plugin.adapters.unlaunched import LAUNCHED, SAID

SCRIPT = """
import {first}
from deepspeed.runtime.config import DeepSpeedConfig
DeepSpeedConfig({{"train_batch_size": 1, "recycle": {section}}})
"""


@pytest.mark.parametrize(
    "first, section, variables, said",
    [
        ("deepspeed", {"enabled": True}, {}, 1),
        ("torch", {"enabled": True}, {}, 1),
        ("deepspeed", {"enabled": True}, {"RANK": "1"}, 0),
        ("deepspeed", {"enabled": False}, {}, 0),
        ("deepspeed", {"enabled": True}, {LAUNCHED: "127.0.0.1:1"}, 0),
    ],
    ids=("deepspeed first", "torch first", "another rank", "switched off", "launched"),
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
