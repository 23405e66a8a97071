"""With everything switched off and no failure the plugin trains as stock DeepSpeed does, bit for bit."""

from __future__ import annotations

import json

import pytest

from tests.support.jobs import OFF, SQUARE, WRAPPED, Shape, assert_bitwise, difference

CLIPPED = ("optimizer=sgd", "gradient_clipping=0.05", "recycle.norm=deepspeed")


@pytest.mark.parametrize(
    "shape", (Shape(stages=1), pytest.param(SQUARE, marks=pytest.mark.all_kills)), ids=("2 x 1", "2 x 2")
)
def test_unclipped_against_the_script_without_the_plugin(launch, shape):
    """The stock run starts from the ``deepspeed`` command, and nothing of the plugin but the script's model is in it.

    With the plugin switched off, as in other tests, the plugin's module trains the same.
    """
    stock = launch("recycle.enabled=false", shape=shape, plugin=None, cold=True).finish()
    assert "recycle_plugin.launch" not in stock.output
    assert_bitwise(launch(*OFF, shape=shape).finish(), stock)
    assert_bitwise(launch("recycle.enabled=false", shape=shape).finish(), stock)


@pytest.mark.parametrize(
    "shape, settings",
    [
        pytest.param(SQUARE, (), id="2 x 2, unclipped"),
        pytest.param(Shape(replicas=3), CLIPPED, id="3 x 2, clipped"),
        pytest.param(SQUARE, CLIPPED, id="2 x 2, clipped", marks=pytest.mark.all_kills),
        pytest.param(Shape(replicas=3), (), id="3 x 2, unclipped", marks=pytest.mark.all_kills),
    ],
)
def test_under_the_plugins_launcher(launch, shape, settings):
    stock = launch("recycle.enabled=false", *settings, shape=shape).finish()
    assert not stock.of("start"), "the stock run has used the plugin's engine"
    assert_bitwise(launch(*OFF, *settings, shape=shape).finish(), stock)


def test_the_clipping_bites(launch, reference):
    clipped = reference(*CLIPPED)
    free = reference("optimizer=sgd")
    assert difference(clipped, free).parameters > 1e-3


@pytest.mark.all_kills
def test_the_true_norm(launch, tmp_path):
    """``norm: true`` is the norm over all stages; stock's, of the first stage and of megatron's linears, is another."""
    norms = {}
    for kind in ("true", "deepspeed"):
        folder = tmp_path / kind
        wrap = json.dumps({"name": "record_norms", "folder": str(folder)})
        run = launch(
            "optimizer=sgd", "gradient_clipping=0.05", f"recycle.norm={kind}", script=WRAPPED, RECYCLE_TEST_WRAP=wrap
        )
        assert run.finish().code == 0
        norms[kind] = [
            [tuple(map(float, line.split())) for line in (folder / f"rank{rank}.txt").read_text().splitlines()]
            for rank in range(4)
        ]
    for used, squares in zip(norms["true"][0], zip(*norms["true"][::2])):
        assert used[0] == pytest.approx(sum(square for _, square, _ in squares) ** 0.5, rel=1e-6)
    assert all({steps[0] for steps in rank} == {steps[0] for steps in norms["true"][0]} for rank in norms["true"]), (
        "workers disagree"
    )
    assert norms["true"][0][0][0] > 1.01 * norms["deepspeed"][0][0][0]
