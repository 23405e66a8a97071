"""``recycle doctor``: the losses that a job survives, the cost of each, and what to change, before the job starts."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path

from recycle_plugin.commands.config_job import COUNT, ConfiguredJob, job_of, made
from recycle_plugin.commands.doctor_losses import slowdown, survival
from recycle_plugin.commands.doctor_memory import memory
from recycle_plugin.commands.doctor_recovery import recovery
from recycle_plugin.commands.doctor_section import WIDTH
from recycle_plugin.commands.doctor_settings import device_link, refused, versions
from recycle_plugin.commands.megatron_flags import megatron
from recycle_plugin.commands.parsers import command
from recycle_plugin.commands.progress import told
from recycle_plugin.observability.measured_costs import COSTS
from recycle_plugin.observability.run_history import RunHistory

DESCRIPTION = """\
Say which failures a job survives, how much slower each makes it, what is refused, and whether it fits into memory.
To see what a setting costs, run it again without it.  Nothing is started, and neither torch nor DeepSpeed is
imported.

recycle doctor ds_config.json --pp 4 --dp 3 --hostfile hosts.txt --profile costs.json
recycle doctor ds_config.json --run runs/train
recycle doctor --megatron --num-layers 24 --pipeline-model-parallel-size 4 ...

With --megatron it only lists which of a Megatron-LM command line's flags are refused.

Ranks are placed as by DeepSpeed: hosts in the hostfile's order, and PipeDataParallelTopology, so that the replicas of a
stage have neighbouring ranks. With recycle.placement "spread" they are dealt out over the hosts.  Slowdowns are the
planner's, for consecutive steps, under the config's settings and costs; "bound" is the least slowdown that any schedule
with this routing and memory could reach.

With recycle.log it says which boundaries are logged, whether the disk has room, and how long a recovery takes.

Exit code: 0 if nothing has to change; 1 if something has to, in lines that begin with "!"; 2 for bad input.
"""


def add(commands: argparse._SubParsersAction) -> None:
    made = command(
        commands, "doctor", "what a job survives, what each loss costs, and what to change", DESCRIPTION, run
    )
    made.add_argument("config", nargs="?", metavar="CONFIG", help='DeepSpeed\'s JSON, with its "recycle" section')
    made.add_argument("--pp", type=int, metavar="P", help="pipeline stages")
    made.add_argument("--dp", type=int, metavar="D", help="replicas of the pipeline (data parallelism)")
    made.add_argument(
        "--megatron",
        nargs=argparse.REMAINDER,
        metavar="FLAGS",
        help="in place of the other arguments: Megatron-LM's own flags",
    )
    made.add_argument(
        "--micro-batches", type=int, metavar="M", help=f"micro-batches of each replica in a step (default: {COUNT})"
    )
    made.add_argument(
        "--hostfile",
        metavar="FILE",
        help="DeepSpeed's: lines such as worker-1 slots=4 (default: all ranks on one host)",
    )
    made.add_argument(
        "--profile",
        metavar="FILE",
        help="costs and bytes from a traced run's costs.json (default: the config's)",
    )
    made.add_argument(
        "--run",
        dest="folder",
        metavar="RUN_DIR",
        type=Path,
        help="the run folder of a job of this model, with recycle.trace: --profile RUN_DIR/costs.json, and --pp and "
        "--dp where they are not given",
    )
    made.add_argument("--json", action="store_true", help='print JSON; its "change" has the lines that begin with "!"')


def run(found: argparse.Namespace) -> int:
    """Examine the job, print the result, and return 1 if something has to change. Raises ValueError for bad input."""
    from recycle_plugin.planner import PlanError

    if found.megatron is not None:
        return megatron(found.megatron)
    if found.folder is not None:
        take_run(found)
    if missing := [name for name in ("config", "pp", "dp") if getattr(found, name) is None]:
        raise ValueError(
            f"{', '.join(missing)} missing: write CONFIG --pp P --dp D, CONFIG --run RUN_DIR, or --megatron FLAGS"
        )
    job = job_of(found)
    try:
        with told(lambda: f"{made()} plans are made for {len(job.shape.seats)} workers"):
            logs = [recovery(job)] if job.settings.log is not None else []
            links = [device_link(job)] if job.settings.device_link != "host" else []
            sections = [survival(job), slowdown(job), *logs, *links, refused(job), versions(), memory(job)]
    except PlanError as error:
        raise ValueError(str(error)) from None
    wrong = [line for section in sections for line in section.wrong]
    if found.json:
        print(
            json.dumps(
                {"job": described(job), **{section.key: section.data for section in sections}, "change": wrong},
                indent=1,
            )
        )
    else:
        print(
            "\n".join([*head(job), *(line for section in sections for line in section.text()), "", verdict(len(wrong))])
        )
    return int(bool(wrong))


def take_run(found: argparse.Namespace) -> None:
    """Fill in missing costs, stages and replicas of ``found`` from its run folder. Raises ValueError for bad input."""
    if found.profile is not None:
        raise ValueError("--run and --profile both name costs: leave one out")
    shape, costs = RunHistory.read(found.folder, whole=False).shape, found.folder / COSTS
    if not costs.is_file():
        raise ValueError(
            f"--run {found.folder}: it has no {COSTS}; train some ten steps with recycle.trace, then write it by "
            f"recycle report {found.folder}"
        )
    found.profile = str(costs)
    found.pp = shape.stages if found.pp is None else found.pp
    found.dp = shape.replicas if found.dp is None else found.dp


def head(job: ConfiguredJob) -> Iterator[str]:
    """Yield the report's first lines: the job's shape and the source of its costs."""
    yield (
        f"--pp {job.stages} --dp {job.replicas}: {len(job.shape.seats)} workers, "
        f"{job.shape.micro_batches} micro-batches of each replica in a step"
    )
    yield from textwrap.wrap(f"costs: {job.origin}", WIDTH, subsequent_indent="    ")


def described(job: ConfiguredJob) -> dict:
    return {
        "stages": job.stages,
        "replicas": job.replicas,
        "micro_batches": job.shape.micro_batches,
        "costs": job.origin,
    }


def verdict(wrong: int) -> str:
    """Return the report's last line: how many things have to change."""
    return f"{wrong} thing{'s' * (wrong > 1)} to change, marked with !" if wrong else "Nothing has to change."
