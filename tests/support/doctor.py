"""``recycle doctor`` on configs that a test makes up, the same on every machine."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest

from recycle_plugin.cli import main
from recycle_plugin.core.vocabulary import profile
from recycle_plugin.core.vocabulary.profile import LayerProfile, Profile, Wire
from recycle_plugin.lab.planner import analytic

SIZES = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 6}
ON = {"recycle": {"enabled": True}}
HEALTHY = {**SIZES, **ON, "gradient_clipping": 0}
MIB = 1 << 20
INSTALLED = {"torch": "2.6.0", "deepspeed": "0.19.3", "megatron-core": "0.16.0"}


@pytest.fixture
def surroundings(monkeypatch) -> dict[str, str]:
    """The same on every machine; tests may change what is installed."""
    installed = dict(INSTALLED)

    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    return installed


@pytest.fixture
def doctor(surroundings, tmp_path: Path, monkeypatch, capsys):
    """``doctor(config, arguments, hosts)``: exit code and what was printed."""
    monkeypatch.chdir(tmp_path)

    def run(config: object, arguments: str, hosts: dict[str, int] | None = None) -> tuple[int, str]:
        Path("ds.json").write_text(json.dumps(config))
        if hosts is not None:
            Path("hosts").write_text(
                "# the cluster\n\n" + "".join(f"{name} slots={slots}\n" for name, slots in hosts.items())
            )
            arguments += " --hostfile hosts"
        code = main(["doctor", "ds.json", *arguments.split()])
        return code, capsys.readouterr().out

    return run


def data(doctor, config: dict, arguments: str, hosts: dict[str, int] | None = None) -> dict:
    code, text = doctor(config, f"{arguments} --json", hosts)
    found = json.loads(text)
    assert code == bool(found["change"])
    return found


def medium(path: str) -> str:
    """The arguments that name an analytic profile of GPT-3 Medium, which is written to ``path``."""
    profile.write(analytic.preset("gpt3_medium"), path)
    return f"--profile {path}"


def small_profile(device_bytes: int | None) -> Profile:
    part = LayerProfile(10_000, 10_000, 10_000, 19_000, 500, MIB, 100 * MIB, 40 * MIB)
    nothing = LayerProfile(0, 0, 0, 0, 0, 0, 0, 0)
    return Profile(
        "small",
        "measured",
        "a device",
        "2026-01-01",
        "by hand",
        "fp32",
        1,
        8,
        False,
        4,
        nothing,
        part,
        nothing,
        MIB,
        4,
        Wire(1, 1e5),
        Wire(1, 1e5),
        1,
        device_bytes,
    )
