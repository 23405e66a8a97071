"""What scripts read of weights between steps stays, and what they write to them does, also where the step is taken
back: with ``clip: validate``, and after a loss.

In the reference every step waits for its norm, and nobody is lost.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.cluster import Result
from tests.support.jobs import BF16, PARAMETER_TOLERANCE, STEPS, WRAPPED, assert_same_training, faults
from tests.support.launching import launching

PLAIN_TOO = pytest.mark.plain_too
CLIPPED = {"deepspeed": "gradient_clipping=1.25", "plain": "gradient_clipping=0.54"}  # some steps, and not all
ALONE = "1.1"
EVALUATED_FIRST = 8  # a step after which an evaluation by hand comes first, with the model in evaluation mode


def run(launch: Callable, folder: Path, *settings: str, **gate: object) -> Result:
    wraps = [{"name": "touch_weights", "folder": str(folder), "alone": ALONE, "flag_at": EVALUATED_FIRST}]
    if gate:
        wraps.append({"name": "gate", "folder": str(folder), "until": "never", **gate})
    return launch(*settings, script=WRAPPED, RECYCLE_TEST_WRAP=json.dumps(wraps)).finish()


@pytest.fixture(scope="module")
def known() -> dict[tuple, tuple[Result, Path]]:
    """By vehicle and settings what ``waited`` gives: each is run once."""
    return {}


@pytest.fixture
def waited(request, vehicle, known, tmp_path_factory) -> Callable[..., tuple[Result, Path]]:
    """The job with these settings in which nobody is lost, nor any step rejected."""

    def made(*settings: str) -> tuple[Result, Path]:
        if (vehicle, settings) not in known:
            folder = tmp_path_factory.mktemp("waited")
            with launching(request.getfixturevalue(vehicle.server), folder, vehicle=vehicle) as launch:
                result = run(launch, folder / "touched", *settings)
            assert result.code == 0, result.output[-6000:]
            known[vehicle, settings] = result, folder / "touched"
        return known[vehicle, settings]

    return made


@pytest.fixture
def clipped(vehicle) -> str:
    return CLIPPED[vehicle.name]


VALIDATED = "recycle.clip=validate"


def touched(folder: Path, seat: str) -> dict[int, dict[str, list[torch.Tensor]]]:
    return torch.load(folder / f"seat{seat}.pt")


def distances(folder: Path, reference: Path, seats: list[str]) -> dict[tuple[str, int, str], float]:
    """By seat, step and way ‖Δ‖/‖t‖ of what was found."""
    by: dict[tuple[str, int, str], float] = {}
    for seat in seats:
        mine, theirs = touched(folder, seat), touched(reference, seat)
        assert set(mine) == set(theirs) == {step for step in range(1, STEPS + 1) if step % 3 or seat == ALONE}
        for step in theirs:
            for way, expected in theirs[step].items():
                a, b = (
                    torch.cat([tensor.double().flatten() for tensor in tensors])
                    for tensors in (mine[step][way], expected)
                )
                by[seat, step, way] = ((a - b).norm() / b.norm()).item()
    return by


SEATS = ["0.0", "0.1", "1.0", "1.1"]


@PLAIN_TOO
@pytest.mark.some_of(1)
@pytest.mark.parametrize("settings", ((), ("recycle.split_backward=false",), ("recycle.undo=inverse",)))
def test_what_is_touched_is_committed(launch, waited, clipped, tmp_path, settings):
    assert_committed(launch, waited, clipped, tmp_path / "touched", settings)


@pytest.mark.all_kills
def test_what_is_touched_is_committed_in_bf16(launch, waited, clipped, tmp_path):
    assert_committed(launch, waited, clipped, tmp_path / "touched", (BF16,))


def assert_committed(launch, waited, clipped: str, folder: Path, settings: tuple[str, ...]) -> None:
    reference, there = waited(clipped, *settings)
    result = run(launch, folder, clipped, VALIDATED, *settings)
    rejected = [event["step"] for event in result.of("rejected")]
    assert result.code == 0 and 0 < len(rejected) < STEPS, result.output[-6000:]
    found, exact = distances(folder, there, SEATS), "recycle.undo=inverse" not in settings
    assert max(found.values()) <= (0 if exact else PARAMETER_TOLERANCE), max(found.items(), key=lambda item: item[1])
    assert not exact or result.losses == reference.losses
    assert assert_same_training(result, reference).parameters == 0 or not exact


@pytest.mark.plain_too(deepspeed=False)
@pytest.mark.parametrize("validated", (True, False), ids=("validated", "not clipped"))
def test_a_loss_while_scripts_evaluate(launch, waited, clipped, tmp_path, validated):
    """The last stage's workers are at it, and have to run forwards of their last step again: nothing is kept."""
    clipping = (clipped, VALIDATED) if validated else ()
    reference, there = waited(*clipping[:1])
    gate = {"before": f"0REDUCE@{EVALUATED_FIRST}", "by": ["0.1", "1.1"]}
    result = run(
        launch,
        tmp_path / "touched",
        *clipping,
        faults(f"kill 0.0 before 0REDUCE@{EVALUATED_FIRST}"),
        "recycle.keep_bytes=1",
        **gate,
    )
    recovery_plans = [
        event
        for event in result.of("recovery_plan")
        if event["step"] == EVALUATED_FIRST and event["seat"].endswith(".1")
    ]
    assert any(recovery["undone"] and recovery["compute"] for recovery in recovery_plans), result.output[-6000:]
    assert_same_training(result, reference, {"0.0"})
    found = distances(tmp_path / "touched", there, SEATS[1:])
    assert max(found.values()) <= PARAMETER_TOLERANCE, max(found.items(), key=lambda item: item[1])


@pytest.mark.all_kills
def test_a_reader_for_whom_all_others_wait_elsewhere(launch, clipped, tmp_path):
    """It needs them where a step is rejected, and only then, and who does not come to that is given up by name."""
    wrap = json.dumps({"name": "wait_for_reader", "folder": str(tmp_path / "flags"), "alone": ALONE})
    soon = "recycle.progress_timeout_s=4", "recycle.busy_timeout_s=4.5", "recycle.idle_timeout_s=5"
    run = launch(clipped, VALIDATED, *soon, script=WRAPPED, RECYCLE_TEST_WRAP=wrap)
    run.hear("lost")
    lost, rejected = run.of("lost")[0], run.of("rejected")[0]
    assert "it is in the training script for" in lost["text"] and "(deadline 5.0 s)" in lost["text"]
    assert lost["time"] > rejected["time"] and rejected["step"] > 1, "the steps before have waited for nobody"
    run.clean()  # the others wait for its reading for ever
