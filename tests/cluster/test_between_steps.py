"""What scripts read of weights between steps stays, and what they write to them does, also where the step is taken back: with ``clip: validate``, and after a loss.

In the reference every step waits for its norm, and nobody is lost.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Callable

import pytest
import torch

from tests.cluster.conftest import launching
from tests.support.cluster import Result
from tests.support.jobs import BF16, PARAMETER_TOLERANCE, STEPS, WRAPPED, assert_one_line, assert_same_training, faults

CLIPPED = "gradient_clipping=1.25"
VALIDATE = (CLIPPED, "recycle.clip=validate")
MORE = pytest.mark.all_kills
ALONE = "1.1"
EVALUATED_FIRST = 8  # a step after which an evaluation by hand comes first, with the model in evaluation mode


def run(launch: Callable, folder: Path, *settings: str, **gate: object) -> Result:
    wraps = [{"name": "touch_weights", "folder": str(folder), "alone": ALONE, "flag_at": EVALUATED_FIRST}]
    if gate:
        wraps.append({"name": "gate", "folder": str(folder), "until": "never", **gate})
    return launch(*settings, script=WRAPPED, RECYCLE_TEST_WRAP=json.dumps(wraps)).finish()


@pytest.fixture(scope="module")
def waited(server, tmp_path_factory) -> Callable[..., tuple[Result, Path]]:
    """The job with these settings in which nobody is lost, nor any step rejected; each is run once."""
    known: dict[tuple[str, ...], tuple[Result, Path]] = {}

    def made(*settings: str) -> tuple[Result, Path]:
        if settings not in known:
            folder = tmp_path_factory.mktemp("waited")
            with launching(server, folder) as launch:
                result = run(launch, folder / "touched", *settings)
            assert result.code == 0, result.output[-6000:]
            known[settings] = result, folder / "touched"
        return known[settings]

    return made


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
                a, b = (torch.cat([tensor.double().flatten() for tensor in tensors]) for tensors in (mine[step][way], expected))
                by[seat, step, way] = ((a - b).norm() / b.norm()).item()
    return by


SEATS = ["0.0", "0.1", "1.0", "1.1"]


@pytest.mark.parametrize(
    "settings",
    (
        (),
        pytest.param(("recycle.split_backward=false",), marks=MORE),
        pytest.param((BF16,), marks=MORE),
        pytest.param(("recycle.undo=inverse",), marks=MORE),
    ),
)
def test_what_is_touched_is_committed(launch, waited, tmp_path, settings):
    reference, there = waited(CLIPPED, *settings)
    result = run(launch, tmp_path / "touched", *VALIDATE, *settings)
    rejected = [event["step"] for event in result.of("rejected")]
    assert result.code == 0 and 0 < len(rejected) < STEPS, result.output[-6000:]
    found, exact = distances(tmp_path / "touched", there, SEATS), "recycle.undo=inverse" not in settings
    assert max(found.values()) <= (0 if exact else PARAMETER_TOLERANCE), max(found.items(), key=lambda item: item[1])
    assert not exact or result.losses == reference.losses
    assert assert_same_training(result, reference).parameters == 0 or not exact


@pytest.mark.parametrize("clipping", (VALIDATE, pytest.param((), marks=MORE)), ids=("validated", "not clipped"))
def test_a_loss_while_scripts_evaluate(launch, waited, tmp_path, clipping):
    """The last stage's workers are at it, and have to run forwards of their last step again: nothing is kept."""
    reference, there = waited(*clipping[:1])
    gate = {"before": f"0REDUCE@{EVALUATED_FIRST}", "by": ["0.1", "1.1"]}
    result = run(launch, tmp_path / "touched", *clipping, faults(f"kill 0.0 before 0REDUCE@{EVALUATED_FIRST}"), "recycle.keep_bytes=1", **gate)
    rests = [event for event in result.of("rest") if event["step"] == EVALUATED_FIRST and event["seat"].endswith(".1")]
    assert any(rest["undone"] and rest["compute"] for rest in rests), result.output[-6000:]
    assert_same_training(result, reference, {"0.0"})
    found = distances(tmp_path / "touched", there, SEATS[1:])
    assert max(found.values()) <= PARAMETER_TOLERANCE, max(found.items(), key=lambda item: item[1])


@MORE
def test_a_reader_for_whom_all_others_wait_elsewhere(launch, tmp_path):
    """It needs them where a step is rejected, and only then, and a deadline names who does not come."""
    wrap = json.dumps({"name": "wait_for_reader", "folder": str(tmp_path / "flags"), "alone": ALONE})
    result = launch(*VALIDATE, "recycle.regroup_timeout_s=5", script=WRAPPED, RECYCLE_TEST_WRAP=wrap).finish()
    assert_one_line(result, f"the job ends: regrouping to generation {len(result.of('rejected'))} waited 5 s for the report of seat")
    assert len(list((tmp_path / "flags").iterdir())) == result.of("rejected")[-1]["step"] - 1
