"""A lost worker comes back to a script that does something between its steps, and trains on with the same bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from itertools import combinations, product
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.support.cluster import ForkServer, Result
from tests.support.from_the_top import BF16, HELD, NOTHING_ELSE, SCRIPT, STEPS
from tests.support.jobs import Shape
from tests.support.launching import Launch, launching

DOES = ("rates", "clamped", "wrapped", "numpy", "frozen", "averages", "zero_grad")
PAIRS = tuple("+".join(pair) for pair in combinations(DOES, 2))
JOBS = [
    *product(DOES, (2, 3), ("fp32", "bf16")),
    *Random("pairs").sample([*product(PAIRS, (2, 3), ("fp32", "bf16"))], 30),
]


def trained(launch: Launch, folder: Path, does: str, replicas: int, bf16: bool, *kills: str) -> tuple[Result, dict]:
    """The job, and what each rank saw in the end; whoever is killed comes back."""
    config = (BF16 if bf16 else {}) | {
        "recycle": {"exact": True, "check_replicas": 1, "faults": kills} | (BF16["recycle"] if bf16 else {})
    }
    job = NOTHING_ELSE | {"pattern": "between", "folder": str(folder), "out": str(folder / "out"), "waits": False}
    job |= {"steps": STEPS, "held": HELD * bool(kills), "drawn": 1234, "source": True, "config": config}
    job |= {"does": does, "tied": "frozen" in does}
    run = launch(shape=Shape(replicas), script=SCRIPT, RECYCLE_TEST_TOP=json.dumps(job))
    if kills:
        back = ("newcomer", "ended")
        run.wait_for(lambda: any(event["event"] in back for event in run.events()), "a newcomer")
        (folder / "go").touch()
    result = run.ended_well()
    saw = [json.loads(path.read_text()) for path in (folder / "out").glob("rank*.json")]
    return result, {each["rank"]: {what: each.get(what) for what in ("losses", "weights", "averages")} for each in saw}


@pytest.fixture(scope="module")
def calm(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[int, Any]]:
    """``calm(does, replicas, bf16)``: what each rank sees where nobody dies."""

    @cache
    def run(*job: Any) -> dict[int, Any]:
        folder = tmp_path_factory.mktemp("calm")
        with launching(server, folder) as launch:
            return trained(launch, folder / "run0", *job)[1]

    return run


@pytest.mark.some_of(4)
@pytest.mark.parametrize(("does", "replicas", "dtype"), JOBS)
def test_what_a_script_does_between_steps_comes_back_too(launch, calm, tmp_path, does, replicas, dtype):
    bf16 = dtype == "bf16"
    result, saw = trained(launch, tmp_path / "run0", does, replicas, bf16, "kill 1.1 before 1F1.0@5")
    assert (
        ["1.1"] == [event["seat"] for event in result.of("lost")] == [event["seat"] for event in result.of("rejoined")]
    )
    assert saw == calm(does, replicas, bf16) and not result.of("warning"), result.of("warning")
