"""Jobs of real processes, of which nothing is left when a test ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.cluster import ForkServer, Run
from tests.support.jobs import DEEPSPEED, SQUARE, TRAIN, WRAPPED, Shape, Vehicle

Launch = Callable[..., Run]


def here(*arguments: object, **options: object) -> Run:
    """A job under the launcher for one host, which costs half as much as DeepSpeed's; not where something is asked for
    that is only in that.
    """
    return Run(
        *arguments,
        **{"launcher": "deepspeed" if "cold" in options or options.get("plugin", "") is None else "plain"} | options,
    )


@contextmanager
def launching(
    server: ForkServer, folder: Path, start: Callable[..., Run] = here, vehicle: Vehicle = DEEPSPEED
) -> Iterator[Launch]:
    """``launch(*overrides, shape=, script=, …)`` starts a job; at the end nothing of any of them may be left."""
    runs: list[Run] = []

    def launch(*more: str, shape: Shape = SQUARE, script: str = TRAIN, **options: object) -> Run:
        place, script = (
            folder / f"run{len(runs)}",
            {TRAIN: vehicle.script, WRAPPED: vehicle.wrapped, **vehicle.others}.get(script, script),
        )
        runs.append(start(server, place, shape.ranks, script, vehicle.arguments(shape, place, *more), **options))
        return runs[-1]

    try:
        yield launch
    finally:
        left = [thing for run in runs for thing in run.clean()]
    assert not left, left


DEADLINE_S = 600  # of a test; a run takes seconds, and minutes where others use the machine
