"""Jobs that a lost worker comes back to."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.cluster import Result, Run
from tests.support.jobs import SQUARE, WRAPPED, Shape, difference, faults, held
from tests.support.launching import Launch

LONG, HELD = 60, 12  # steps; the others wait at HELD until the newcomer is there


def comes_back(
    launch: Launch,
    folder: Path,
    kill: str,
    *more: str,
    shape: Shape = SQUARE,
    wraps: tuple[dict, ...] = (),
    steps: int = LONG,
    later: tuple[str, ...] = (),
) -> Run:
    """A job, changed by ``wraps``, in which the worker is killed, and the others go on once its newcomer asks to take
    part; ``later``: further faults.
    """
    wrap = json.dumps([held(folder, HELD, "go"), *wraps])
    run = launch(
        f"steps={steps}",
        "recycle.rejoin=always",
        faults(kill, *later),
        *more,
        shape=shape,
        script=WRAPPED,
        RECYCLE_TEST_WRAP=wrap,
    )
    run.hear("newcomer")
    (folder / "go").touch()
    return run


def assert_came_back(result: Result, reference: Result, seat: str, exact: bool = False) -> None:
    """All workers have trained to the end, the newcomer from where it was let in; ``exact``: to the same bits."""
    assert result.code == 0, result.output[-6000:]
    came_back = [event["seat"] for event in result.of("rejoined")]
    assert [event["seat"] for event in result.of("lost")] == [seat] == came_back, result.output[-6000:]
    assert result.records.keys() == reference.records.keys()
    found = difference(result, reference)
    assert found.none if exact else found.tolerated, found
