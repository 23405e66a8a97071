"""Profiles and the analytic A100: counted operations, split over stages, written and read back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from recycle_plugin.core.vocabulary import profile
from recycle_plugin.core.vocabulary.profile import Wire, ring_us
from recycle_plugin.lab.planner import analytic

MEDIUM = analytic.preset("gpt3_medium")
CONFIGS = Path(__file__).parents[2] / "configs" / "model"


@pytest.mark.parametrize("name", ["gpt3_medium", "gpt3_3_35b", "gpt3_6_7b"])
def test_shapes_are_those_of_the_configs(name: str) -> None:
    config = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    shape = analytic.SHAPES[name]
    assert all(getattr(shape, key) == config[key] for key in ("layers", "hidden", "sequence", "vocabulary"))


@pytest.mark.parametrize(
    "name, billions",
    [
        ("gpt3_3_35b", 3.35),
        ("gpt3_6_7b", 6.7),
        ("gpt_18_4b", 18.4),
        ("gpt_39_1b", 39.1),
        ("gpt_76_1b", 76.1),
        ("gpt_145_6b", 145.6),
    ],
)
def test_sizes_are_those_of_the_names(name: str, billions: float) -> None:
    shape = analytic.SHAPES[name]
    tied = shape.parameters - shape.vocabulary * shape.hidden
    assert tied / 1e9 == pytest.approx(billions, rel=0.01)
    parts = analytic.preset(name)
    assert parts.first.parameters + parts.layers * parts.layer.parameters + parts.last.parameters == pytest.approx(
        shape.parameters, rel=1e-4
    )


def test_a_whole_model_takes_six_operations_a_parameter_and_token() -> None:
    """... at half of 312 TFLOP/s, with attention's scores and memory traffic on top."""
    model = analytic.preset("gpt3_6_7b")
    parts = [model.first, *[model.layer] * model.layers, model.last]
    seconds = sum(part.compute_us for part in parts) / 1e6
    parameters = sum(part.parameters for part in parts[1:])
    assert 1 < seconds / (6 * parameters * 2048 / 156e12) < 1.15


def test_stages_share_the_layers_evenly_and_ends_count() -> None:
    counts = MEDIUM.split(4)
    assert sum(counts) == 24 and counts[-1] < counts[1], "the head stands for several layers"
    costs = MEDIUM.costs(4, 6)
    work = [sum(row) for row in zip(costs.forward, costs.input, costs.weight)]
    assert max(work) / min(work) < 1.2
    with pytest.raises(ValueError, match="24 layers for 25 stages"):
        MEDIUM.split(25)


def test_checkpointing_runs_the_forward_again_and_holds_little() -> None:
    saved = analytic.preset("gpt3_medium-ckpt")
    assert saved.layer.input_us == pytest.approx(MEDIUM.layer.input_us + MEDIUM.layer.forward_us)
    assert saved.layer.activation_bytes < MEDIUM.layer.activation_bytes / 10
    assert saved.layer.pending_bytes > saved.layer.activation_bytes, "what a pending W holds is the larger"


def test_ring() -> None:
    assert ring_us(Wire(10, 100), 1000, 1) == 0
    assert ring_us(Wire(10, 100), 1000, 2) == 2 * (10 + 5)
    assert ring_us(Wire(0, 100), 6000, 6) == 2 * 5 * 10


def test_every_origin_is_named() -> None:
    assert "ANALYTIC" in MEDIUM.title and len(MEDIUM.assumptions) >= 7
    with pytest.raises(ValueError, match="origin"):
        replace(MEDIUM, origin="guessed")
    with pytest.raises(ValueError, match="gpt3_medium"):
        analytic.preset("gpt4")


def test_written_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profile.write(MEDIUM, path)
    assert profile.read(path) == MEDIUM


@pytest.mark.parametrize(
    "change",
    [
        {"layers": 0},
        {"first": {}},
        {"origin": "x"},
        {"more": 1},
        {"boundary_bytes": "x"},
        {"boundary_bytes": 10**400},
        {"name": 3},
        {"checkpointing": "no"},
        {"assumptions": 3},
        {"last": [1]},
        {"inside": {"latency_us": float("nan"), "bytes_per_us": 1}},
        {"across": {"latency_us": 1, "bytes_per_us": float("inf")}},
        {"gpus_per_worker": 0},
        {"device_bytes": 1.5},
        {"layer": {**dict.fromkeys(MEDIUM.layer.__dict__, 1), "forward_us": -1}},
    ],
)
def test_a_broken_profile_is_named(tmp_path: Path, change: dict) -> None:
    path = tmp_path / "profile.json"
    profile.write(MEDIUM, path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match="profile.json is no profile"):
        profile.read(path)


def test_no_json(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("F=1")
    with pytest.raises(ValueError, match="is no profile"):
        profile.read(tmp_path / "x")


def test_a_link_without_bandwidth_is_refused() -> None:
    with pytest.raises(ValueError, match="bandwidth"):
        Wire(0, 0)
