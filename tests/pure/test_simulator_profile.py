"""Profiles and the analytic A100: counted operations, split over stages."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from recycle_plugin.lab.planner import analytic
from recycle_plugin.lab.planner.profile import Wire, ring_us

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


def test_a_title_says_that_it_is_analytic() -> None:
    assert "ANALYTIC" in MEDIUM.title
    with pytest.raises(ValueError, match="gpt3_medium"):
        analytic.preset("gpt4")
