"""What tests of reports share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.run_folder import LOG


@pytest.fixture
def folder(tmp_path) -> Path:
    """A run folder with the events; every step has a loss."""
    lines = [json.loads(line) for line in LOG.read_text().splitlines()]
    losses = [
        {"time": one["time"], "event": "loss", "text": "", "step": one["step"], "loss": 5 - one["step"] / 10}
        for one in lines
        if one["event"] == "committed"
    ]
    (tmp_path / "events.jsonl").write_text(
        "".join(f"{json.dumps(one)}\n" for one in sorted(lines + losses, key=lambda one: one["time"]))
    )
    return tmp_path
