"""What the launch module knows before there is a worker: the script's command, and where ranks go."""

from __future__ import annotations

import json

import pytest

from recycle_plugin.launch import placement, script_command
from recycle_plugin.runs import free_port
from recycle_plugin.runtime import supervisor

ON = {"recycle": {"enabled": True, "placement": "spread"}}


def test_local_rank_goes_behind_the_script():
    assert script_command(["--local_rank=1", "train.py", "--steps", "3"]) == ["train.py", "--local_rank=1", "--steps", "3"]


@pytest.mark.parametrize(
    "config, says",
    [
        (ON, "spread"),
        ({"recycle": {"enabled": True}}, "deepspeed"),
        ({"recycle": {"placement": "spread"}}, "deepspeed"),
        ({"recycle": {"enabled": True, "placement": "apart"}}, "deepspeed"),  # which the workers refuse
        ({"placement": "spread"}, "deepspeed"),
        (["placement"], "deepspeed"),
    ],
)
@pytest.mark.parametrize("joined", (True, False))
def test_placement_is_read_from_the_config_on_the_command_line(tmp_path, config, says, joined):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config))
    named = [f"--deepspeed_config={path}"] if joined else ["--deepspeed_config", str(path)]
    assert placement(["train.py", "--steps", "3", *named, "--fp32"]) == says


@pytest.mark.parametrize("command", ([], ["train.py"], ["train.py", "--deepspeed_config"], ["train.py", "--deepspeed_config=missing.json"]))
def test_no_config_on_the_command_line(command):
    assert placement(command) == "deepspeed"


def test_placement_waits_for_no_host_for_ever(monkeypatch, capsys):
    monkeypatch.setattr(supervisor, "CONNECT_S", 0.5)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}.items():
        monkeypatch.setenv(name, value)
    assert supervisor.main(["train.py"], "spread") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith('recycle: error: place 0 has got no rank within 0 s: with recycle.placement "spread" all supervisors have to be there first')
