"""Jobs of real processes, of which nothing is left when a test ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.cluster import ForkServer, Result, Run
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
def cleaned() -> Iterator[list[Run]]:
    """A list for the jobs of a test; at the end nothing of any of them may be left."""
    runs: list[Run] = []
    try:
        yield runs
    finally:
        left = [thing for run in runs for thing in run.clean()]
    assert not left, left


def finished(run: Run, held: Sequence[int], newcomers: int) -> Result:
    """The result of a job whose members are held before these steps, each time until so many more have come."""
    for times, step in enumerate(held, 1):
        run.hear("newcomer", times * newcomers)
        (run.folder / f"go{step}").touch()
    return run.finish()


@contextmanager
def launching(
    server: ForkServer, folder: Path, start: Callable[..., Run] = here, vehicle: Vehicle = DEEPSPEED
) -> Iterator[Launch]:
    """``launch(*overrides, shape=, script=, …)`` starts a job; at the end nothing of any of them may be left."""
    scripts = {TRAIN: vehicle.script, WRAPPED: vehicle.wrapped, **vehicle.others}
    with cleaned() as runs:

        def launch(*more: str, shape: Shape = SQUARE, script: str = TRAIN, **options: object) -> Run:
            place, program = folder / f"run{len(runs)}", scripts.get(script, script)
            runs.append(start(server, place, shape.ranks, program, vehicle.arguments(shape, place, *more), **options))
            return runs[-1]

        yield launch


DEADLINE_S = 600  # of a test; a run takes seconds, and minutes where others use the machine
