"""``recycle doctor`` on configs that a test makes up, the same on every machine."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest

from recycle_plugin.cli import main

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


def costs(device_bytes: int | None, stages: int = 2, samples: int = 1) -> dict:
    """A run's costs.json, of stages of two layers each: 10 ms for each of F, I and W of a layer, whose boundary tensor,
    gradient and weights have 1, 4 and 4 MiB. ``device_bytes``: None: of a run on the host.
    """
    stage = {
        "weights": 8 * MIB,
        "masters": 0,
        "optimizer": 16 * MIB,
        "frozen": 0,
        "gradient": 8 * MIB,
        "largest": 4 * MIB,
        "boundary": MIB,
        "device": "cpu" if device_bytes is None else "cuda",
        "device_bytes": device_bytes or 1 << 40,
        "host_bytes": 1 << 40,
        "samples": samples,
    }
    each = {"forward": 20_000, "input": 20_000, "weight": 20_000, "step": 1000}
    each |= {"activation_bytes": 200 * MIB, "pending_bytes": 80 * MIB}
    memory = [stage | {"boundary": MIB * (number < stages - 1)} for number in range(stages)]
    return {name: [value] * stages for name, value in each.items()} | {"memory": memory}


def of_a_run(device_bytes: int | None = None, stages: int = 2) -> str:
    """The arguments that name :func:`costs`, which are written to costs.json."""
    Path("costs.json").write_text(json.dumps(costs(device_bytes, stages)))
    return "--profile costs.json"
