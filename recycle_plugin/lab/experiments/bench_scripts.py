"""Shared parts of the benchmarks' scripts: their start and end, and runs that several of them measure."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.lab.experiments.measurements import REPLACED, WARM_UP, Constants, TooShort, calibrate, intervals
from recycle_plugin.lab.runs import RunFailed, TrainingRun, terminable
from recycle_plugin.observability.trace import read_traces

DEADLINE_S = 600.0  # of a run, and of each wait in it


def script(main: Callable[[list[str]], int]) -> None:
    """Run a script's ``main`` and exit: with 130 after Ctrl-C or SIGTERM, with one line if a run failed."""
    try:
        with terminable():
            code: int | str = main(sys.argv[1:])
    except KeyboardInterrupt:
        code = 130
    except (RunFailed, TooShort) as failure:
        code = f"{Path(sys.argv[0]).stem}: {failure}"
    sys.exit(code)


def run_part(parts: Mapping[str, Callable[[argparse.Namespace], dict]], found: argparse.Namespace) -> int:
    """Run ``found.part``, write its result to ``found.out``, and return 0 if the result says that its target is met."""
    found.out.mkdir(parents=True, exist_ok=True)
    result = parts[found.part](found)
    path = found.out / f"{found.part}.json"
    path.write_text(json.dumps(result, indent=1))
    print(f"written to {path}")
    return int(not result["met"])


def told(folder: Path, costs: CostModel) -> str:
    """Write ``costs`` to a file in ``folder`` for a job's planner, and return the override that names it."""
    path = folder.resolve() / "costs.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({name: value for name, value in asdict(costs).items() if value}))
    return f"recycle.costs={path}"


def calibration(folder: Path, workers: int, overrides: Sequence[str], nominal_us: int) -> Constants:
    """Calibrate from the trace of a fault-free run whose F, I and W take ``nominal_us``. Raises RunFailed."""
    with TrainingRun(folder, workers, [*overrides, "recycle.enabled=true", "recycle.trace=true"]) as run:
        run.finish(DEADLINE_S)
    return calibrate(read_traces(folder / "trace"), nominal_us)


def one_loss(
    folder: Path, workers: int, overrides: Sequence[str], lost: Seat, steps: int
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Kill ``lost`` in a job; return seconds of ``steps`` steps before and after, and digests. Raises RunFailed."""
    with TrainingRun(
        folder, workers, [*overrides, "recycle.enabled=true", "recycle.rejoin=never", "steps=100000"]
    ) as run:
        run.wait_for(lambda: run.committed() >= WARM_UP + steps, f"{steps} fault-free steps", DEADLINE_S)
        run.kill(run.rank_at(str(lost)))
        resume = run.wait_for(lambda: run.resumes()[1:], f"recovery from the loss of {lost}", DEADLINE_S)[0]
        first = resume["committed"] + REPLACED
        run.wait_for(lambda: run.committed() >= first + steps, f"{steps} degraded steps", DEADLINE_S)
        events = run.events()
    commits = {event["step"]: event["time"] for event in events if event["event"] == "committed"}
    times = {
        "fault_free": intervals(commits, WARM_UP, WARM_UP + steps),
        "degraded": intervals(commits, first, first + steps),
    }
    return times, {name: resume["digest"] for name, resume in zip(times, run.resumes())}
