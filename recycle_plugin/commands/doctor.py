"""``recycle doctor``: what a job survives, what each loss costs, and what to change, before anything is started."""

from __future__ import annotations

import argparse
import json
import os
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import compress
from typing import Any

from recycle_plugin.commands.config_job import CLIPPING, COUNT, ONE_HOST, ConfiguredJob, at_risk, job_of
from recycle_plugin.commands.exact_mode import buffer_bytes, cost
from recycle_plugin.commands.losses import NAMED, clipped, host_cases, stages_text, worker_cases
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.placement import remedy
from recycle_plugin.core.vocabulary.profile import STATE_BYTES, UNDO_BYTES
from recycle_plugin.settings.wording import SECTION, shown
from recycle_plugin.versions import releases

DESCRIPTION = """\
Say which failures a job survives, how much slower each makes it, what its settings cost, what is refused, and whether
it fits into memory.  Nothing is started, and neither torch nor DeepSpeed is imported.

recycle doctor ds_config.json --pp 4 --dp 3 --hostfile hosts.txt --profile profile.json

Ranks sit as DeepSpeed puts them: hosts in the hostfile's order, and PipeDataParallelTopology, so that the replicas of a
stage have neighbouring ranks; or dealt out over the hosts, with recycle.placement "spread".  Slowdowns are the
planner's, of steps that follow each other, under the config's settings and costs; "bound" is the least that any
schedule with this routing and memory could reach.  What would be "faster, at best" is not done yet: other ways to go
on than rerouting, by their own lower bounds and without the time to change over.

Exit code: 0 where nothing has to change; 1 where something has to, in lines that begin with "!"; 2 for bad input.
"""
WIDTH = 100
OPTIONS_UP_TO = 128  # workers; what else could be done takes seconds to predict for each loss in larger jobs
ROWS = 8  # hosts in a table: --json has all


def add(commands: argparse._SubParsersAction) -> None:
    """Add the subcommand and its arguments."""
    made = commands.add_parser(
        "doctor",
        help="what a job survives, what each loss costs, and what to change",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("config", metavar="CONFIG", help='DeepSpeed\'s JSON, with its "recycle" section')
    made.add_argument("--pp", type=int, required=True, metavar="P", help="pipeline stages")
    made.add_argument("--dp", type=int, required=True, metavar="D", help="replicas of the pipeline (data parallelism)")
    made.add_argument(
        "--micro-batches", type=int, metavar="M", help=f"micro-batches of each replica in a step (default: {COUNT})"
    )
    made.add_argument(
        "--hostfile",
        metavar="FILE",
        help="DeepSpeed's: lines such as worker-1 slots=4 (default: all ranks on one host)",
    )
    source = made.add_mutually_exclusive_group()
    source.add_argument(
        "--profile",
        metavar="FILE",
        help="costs and bytes from the JSON file that recycle profile wrote (default: the config's)",
    )
    source.add_argument(
        "--preset",
        metavar="NAME",
        help="costs and bytes of a named model, an analytic A100: see recycle simulate --help",
    )
    made.add_argument(
        "--json", action="store_true", help='the same as data; "change" has the lines that begin with "!"'
    )
    made.set_defaults(run=run)


def run(found: argparse.Namespace) -> int:
    """Examine the job and print what was found; returns 1 where something has to change.  Raises ValueError for bad
    input.
    """
    from recycle_plugin.planner import PlanError

    job = job_of(found)
    try:
        sections = [survival(job), slowdown(job), costly(job), refused(job), versions(), memory(job)]
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


def head(job: ConfiguredJob) -> Iterator[str]:
    """The report's first lines: the job's shape and where its costs come from."""
    yield (
        f"--pp {job.stages} --dp {job.replicas}: {len(job.shape.seats)} workers, "
        f"{job.shape.micro_batches} micro-batches of each replica in a step"
    )
    yield from textwrap.wrap(f"costs: {job.origin}", WIDTH, subsequent_indent="    ")


def described(job: ConfiguredJob) -> dict:
    """The job's shape as data for ``--json``."""
    return {
        "stages": job.stages,
        "replicas": job.replicas,
        "micro_batches": job.shape.micro_batches,
        "costs": job.origin,
    }


def verdict(wrong: int) -> str:
    """The report's last line: how many things have to change."""
    return f"{wrong} thing{'s' * (wrong > 1)} to change, marked with !" if wrong else "Nothing has to change."


@dataclass(frozen=True)
class Section:
    """A section of the report.

    ``wrong``: lines on what has to change.  ``table``: lines that are aligned already, behind ``lines``.
    """

    key: str
    title: str
    data: Any
    lines: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()
    table: tuple[str, ...] = ()

    def text(self) -> Iterator[str]:
        """The section's lines, wrapped, with marks."""
        yield from ("", self.title)
        for mark, lines in ("! ", self.wrong), ("  ", self.lines):
            for line in lines:
                yield from textwrap.wrap(
                    line, WIDTH, initial_indent=mark, subsequent_indent="    ", break_on_hyphens=False
                )
        yield from ("  " + line.rstrip() for line in self.table)


# --- what it survives ------------------------------------------------------------------------------------


def survival(job: ConfiguredJob) -> Section:
    """The section on what the job survives: which workers, and which hosts."""
    risky = at_risk(job.hosts)
    rows = [_host(job, host, risky.get(host, ())) for host in job.hosts]
    each, workers = (job.replicas - 1) * job.survives, len(job.shape.seats)
    lines = ["workers: none"]
    if job.survives:
        lines = [
            f"workers: any {each}; at best {each * job.stages} of {workers}, if one is left in every stage",
            "ends it: a stage's last worker; the host of rank 0, which runs the coordinator and the store",
        ]
    if len(rows) == 1:
        lines.append("hosts: none, all ranks are on one" + " (no --hostfile given)" * (ONE_HOST in job.hosts))
    if job.spare_slots:
        lines.append(
            f"slots: {job.spare_slots} more than workers; launch with --num_nodes or --num_gpus to leave them out"
        )
    data = {"any_workers": each, "at_best_workers": each * job.stages, "workers": workers, "hosts": rows}
    table = tuple(_host_table(rows)) if len(rows) > 1 else ()
    return Section("survives", "What it survives", data, tuple(lines), tuple(_weak(job, risky)), table)


def _host(job: ConfiguredJob, host: str, risky: tuple[int, ...]) -> dict:
    """A row of the table of hosts; ``ends``: why the host's loss ends the job, "" where it does not."""
    seats = job.hosts[host]
    ranks = [seat.stage * job.replicas + seat.replica for seat in seats]
    reasons = ["coordinator"] * (ranks[0] == 0) + [f"all of {stages_text(risky)}"] * bool(risky)
    if not (reasons or job.survives):
        reasons = ["no rerouting"]
    return {"host": host, "ranks": ranks, "seats": list(map(str, seats)), "ends": "; ".join(reasons)}


def _host_table(rows: list[dict]) -> Iterator[str]:
    table = [("host", "ranks", "seats", "its loss")]
    for row in rows[:ROWS]:
        seats, ranks = row["seats"], row["ranks"]
        named = " ".join(seats) if len(seats) <= NAMED else f"{seats[0]} ... {seats[-1]}"
        table.append(
            (
                clipped(row["host"]),
                _numbers(ranks),
                named,
                f"ends the job: {row['ends']}" if row["ends"] else "is survived",
            )
        )
    yield from aligned(table)
    if len(rows) > ROWS:
        yield f"and {len(rows) - ROWS} hosts more: --json has them all"


def _numbers(ranks: list[int]) -> str:
    if ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return " ".join(map(str, ranks)) if len(ranks) <= NAMED else f"{ranks[0]} ... {ranks[-1]}"


def _weak(job: ConfiguredJob, risky: dict[str, tuple[int, ...]]) -> Iterator[str]:
    if not job.settings.enabled:
        yield f"{SECTION}.enabled is false: the stock engine runs, and any loss ends the job; set it to true"
    if not job.settings.reroute:
        yield f"{SECTION}.reroute is false: any loss ends the job; set it to true"
    if job.replicas == 1:
        yield (
            "--dp 1: a lost worker has no peer to take its micro-batches, and the plugin refuses it; "
            "use two replicas or more"
        )
    elif risky and (len(job.hosts) > 1 or job.settings.strict_placement):
        refuses = f"; {SECTION}.strict_placement refuses to start" if job.settings.strict_placement else ""
        held = "; ".join(
            f"{clipped(host)} holds every replica of {stages_text(stages)}"
            for host, stages in list(risky.items())[:NAMED]
        )
        more = f"; so do {len(risky) - NAMED} hosts more with other stages" if len(risky) > NAMED else ""
        yield f"{held}{more}{refuses}: {_mend(job)}"


def _mend(job: ConfiguredJob) -> str:
    """What gives the replicas of each stage to different hosts."""
    return remedy(Counter({clipped(host): len(seats) for host, seats in job.hosts.items()}), job.shape)


def aligned(rows: list[tuple[str, ...]], right: tuple[int, ...] = ()) -> list[str]:
    """Lines with columns of equal width from rows of cells; ``right``: columns that are aligned at their right end."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.rjust(w) if at in right else cell.ljust(w) for at, (cell, w) in enumerate(zip(row, widths)))
        for row in rows
    ]


# --- what each loss costs --------------------------------------------------------------------------------


def slowdown(job: ConfiguredJob) -> Section:
    """The section on what each kind of loss costs; one plan and its alternatives for each.  Raises PlanError."""
    free, _ = job.planned()
    nobody = _row(job, "nobody", (), free)
    rows, hosts, each = [nobody], [], []
    if job.survives:
        rows += [_row(job, name, lost, free) for name, lost in worker_cases(job)]
        hosts = [_row(job, name, job.hosts[alike[0]], free) | {"hosts": alike} for name, alike in host_cases(job)]
        hosts.sort(key=lambda row: -row["slowdown"])
        each = [round(job.planned((Seat(0, stage),))[0] / free, 4) for stage in range(job.stages)]
    lines = []
    if len(job.shape.seats) > OPTIONS_UP_TO:
        lines.append(f"what would be faster than rerouting is predicted for up to {OPTIONS_UP_TO} workers only")
    if len(hosts) > ROWS:
        lines.append(f"of {len(hosts)} kinds of host the {ROWS} worst are shown: --json has all")
    table = tuple(_slowdown_table([*rows, *hosts[:ROWS]], job.settings.exact))
    return Section(
        "slowdown", "Predicted slowdown", {"each_stage": each, "cases": [*rows, *hosts]}, tuple(lines), table=table
    )


def _slowdown_table(rows: list[dict], exact: bool) -> list[str]:
    table = [("lost", "step", "slower", "bound", "without exact", "faster, at best")]
    for row in rows:
        other = row["faster"]
        faster = f"{other['name']}: {times(other['slowdown'])}" if other else ""
        table.append(
            (
                row["lost"],
                ms(row["period_us"]),
                times(row["slowdown"]),
                times(row["bound"]),
                ms(row["without_exact_us"]),
                faster,
            )
        )
    shown_columns = [True] * 4 + [exact, any(row["faster"] for row in rows)]
    return aligned([tuple(compress(row, shown_columns)) for row in table], (1, 2, 3, *([4] if exact else [])))


def _row(job: ConfiguredJob, name: str, lost: tuple[Seat, ...], free: int) -> dict:
    period, bound = job.planned(lost)
    return {
        "lost": name,
        "seats": list(map(str, lost)),
        "period_us": period,
        "bound_us": bound,
        "slowdown": round(period / free, 4),
        "bound": round(bound / free, 4),
        "faster": _faster(job, lost, period, free),
        "without_exact_us": job.planned(lost, block=1)[0],
    }


def _faster(job: ConfiguredJob, lost: tuple[Seat, ...], period: int, free: int) -> dict | None:
    """What would be faster than rerouting, bound against bound."""
    from recycle_plugin import planner

    if period <= free or len(job.shape.seats) > OPTIONS_UP_TO:
        return None
    layers = job.profile.layers if job.profile else 0
    best = planner.options(job.shape.full().without(*lost), job.costs, job.policy, layers)[0]
    return (
        None
        if best.name == "reroute"
        else {"name": best.name, "period_us": best.period_us, "slowdown": round(best.period_us / free, 4)}
    )


def ms(microseconds: int) -> str:
    """Microseconds in words, as milliseconds."""
    return f"{microseconds / 1000:.4g} ms"


def times(ratio: float) -> str:
    """A ratio in words, as "1.25x"."""
    return f"{ratio:.2f}x"


# --- what the settings cost ------------------------------------------------------------------------------


def costly(job: ConfiguredJob) -> Section:
    """The section on what the job's settings cost, and what would change that.  Raises PlanError."""
    from recycle_plugin.adapters.deepspeed.refusals import bf16

    settings, rows = job.settings, []
    if job.clipping > 0:
        said = "" if CLIPPING in job.config else " (DeepSpeed's default)"
        waits = f"{job.clipping:g}{said}: steps wait for the norm over all stages"
        redone = f"{job.clipping:g}{said}: no step waits for the norm; one that is over it is taken back and clipped"
        rows.append(
            _switch(job, CLIPPING, waits, f'0, or {SECTION}.clip "validate"', validate=False)
            if settings.waits_for_norm(job.clipping)
            else {"setting": CLIPPING, "text": redone}
        )
    for name, why in (
        ("split_backward", "weight gradients fill no bubbles"),
        ("stagger_optimizer", "all stages step together"),
    ):
        if not getattr(settings, name):
            rows.append(_switch(job, f"{SECTION}.{name}", f"false: {why}", "true", **{name: True}))
    if job.survives:
        rows.append(_cap(job))
    rows.append({"setting": f"{SECTION}.exact", **(found := cost(job)), "text": _exact(job, found)})
    name = bf16(job.config)
    if name is not None:
        rows.append(
            {
                "setting": f"{name}.enabled",
                "text": f"true: {_whole('bf16', job.replicas)}; gradients are summed in fp32, over micro-batches and "
                "over workers",
            }
        )
    elif settings.zero is not None:
        rows.append({"setting": f"{SECTION}.zero", "text": f'"{settings.zero}": {_whole("fp32", job.replicas)}'})
    rows.append(
        {"setting": f"{SECTION}.undo", "bytes_a_parameter": UNDO_BYTES[settings.undo], "text": _undo(settings.undo)}
    )
    lines = tuple(f"{row['setting']} {row.pop('text')}" for row in rows)
    return Section("settings", "What settings cost", rows, lines)


def _exact(job: ConfiguredJob, found: dict) -> str:
    """Exact mode, or what it would cost, side by side with the same job without it."""
    now, without = found["now"], found["without"]
    size, each = buffer_bytes(job), f"blocks of {now['block']} micro-batches"
    said = f"true, {each}: " if found["on"] else f"false: the same bits after any failure ({each}) would cost "
    said += f"the step {ms(now['period_us'])} (without: {ms(without['period_us'])})"
    if job.survives:
        said += f", after one loss {ms(now['period_one_lost_us'])} (without: {ms(without['period_one_lost_us'])})"
    more = " and ".join(str(count - 1) for count in now["blocks"][: 1 + job.survives])
    said += f"; {more} gradient buffers more" + (f" of {gib(size)}" if size is not None else "")
    said += (
        f"; sums move {' and '.join(f'{ratio:g}' for ratio in now['moved'][: 1 + job.survives])} times an all-reduce's "
        "bytes"
    )
    if found["smaller"]:
        less = [
            f"{other['block']}: {ms(other['period_one_lost_us'])}, {other['blocks'][1] - 1} buffers"
            for other in found["smaller"]
        ]
        said += f"; after one loss with {SECTION}.exact_block {'; '.join(less)}"
    return said


def _whole(dtype: str, replicas: int) -> str:
    whole, state = STATE_BYTES[dtype], UNDO_BYTES["snapshot"]
    return (
        f"every worker has the optimizer's state whole, {whole} bytes a parameter (Adam), stock a share of it, "
        f"{whole - state + state / replicas:.3g}"
    )


def _undo(way: str) -> str:
    other, of_it = ("inverse", "not exact") if way == "snapshot" else ("snapshot", "exact")
    return f'"{way}": {UNDO_BYTES[way]} bytes a parameter (Adam in fp32); "{other}": {UNDO_BYTES[other]}, {of_it}'


def _switch(job: ConfiguredJob, setting: str, now: str, instead: str, **changed: Any) -> dict:
    """A row on a setting that takes away one of the planner's techniques.

    Where memory hides what that costs, more memory shows it.
    """
    from recycle_plugin.planner import PlanError

    row = {"setting": setting, "period_us": job.planned()[0], "period_one_lost_us": job.one_lost()}
    roomy = {"activation_cap": job.busiest, "memory_bytes": None}
    for more, said in ({}, f"{instead}: "), (roomy, f"{instead}, and {SECTION}.activation_cap {job.busiest}: "):
        try:
            after = (job.planned(**changed, **more)[0], job.one_lost(**changed, **more))
        except PlanError:  # bytes that hold an activation, but not what a split backward keeps
            continue
        befores = row["period_us"], row["period_one_lost_us"]
        gained = [
            f"{what} {ms(old)} -> {ms(new)}"
            for what, old, new in zip(("the step", "after one loss"), befores, after)
            if new < old
        ]
        if gained:
            changes = {
                "activation_cap": more.get("activation_cap"),
                "period_us_changed": after[0],
                "period_one_lost_us_changed": after[1],
            }
            return row | changes | {"text": f"{now}; {said}{', '.join(gained)}"}
    return row | {"text": f"{now}, which costs nothing here"}


def _cap(job: ConfiguredJob) -> dict:
    """The least memory at which one loss, whichever, costs as little as it can."""
    free, now, most = job.planned()[0], job.one_lost(), job.busiest

    def period(held: int) -> int:
        return job.one_lost(activation_cap=held, memory_bytes=None)

    goal = max(free, period(most))
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if period(middle) <= goal else (middle + 1, high)
    least = period(high)
    cost = "nothing" if least <= free else times(least / free)
    size = f" ({gib(max(row['each'] for row in held_bytes(job)) * high)})" if job.profile else ""
    row = {
        "setting": f"{SECTION}.activation_cap",
        "least": high,
        "period_one_lost_us": now,
        "period_one_lost_us_changed": least,
    }
    held = shown(job.settings.activation_cap)
    if now <= goal:
        return row | {"text": f"{held} is enough: from {high} micro-batches{size} on one loss costs {cost}"}
    return row | {"text": f"{held}: one loss costs {times(now / free)}; {high} micro-batches{size}: {cost}"}


# --- what is refused, and versions -----------------------------------------------------------------------


def refused(job: ConfiguredJob) -> Section:
    """The section on what the plugin refuses of the config."""
    from recycle_plugin.adapters.deepspeed.refusals import refusals

    wrong = [*refusals(job.config), *([job.mismatch] if job.mismatch else [])]
    accelerator = os.environ.get("DS_ACCELERATOR")
    if accelerator not in (None, "cpu"):
        wrong.append(f"DS_ACCELERATOR is {accelerator}: only the CPU is supported yet; set it to cpu")
    lines = [] if wrong else ["nothing that the config asks for"]
    if accelerator is None:
        lines.append("only the CPU is supported yet: set DS_ACCELERATOR=cpu where the job runs")
    lines.append("seen at the start only: tensor parallelism, running statistics, plain iterators")
    return Section("refused", "What is refused", wrong, tuple(lines), tuple(wrong))


def versions() -> Section:
    """The section on the releases installed here against those that the plugin is written for."""
    known = releases()
    table = aligned([(one.name, one.installed or "not installed", f"needs {one.needs}") for one in known])
    rows = [{**one._asdict(), "fits": one.fits} for one in known]
    return Section(
        "versions", "Versions here", rows, (), tuple(one.wrong for one in known if not one.fits), tuple(table)
    )


# --- memory ----------------------------------------------------------------------------------------------

PARTS = {
    "state": "state",
    "undo": "undo",
    "blocks": "blocks",
    "kept": "kept",
    "activations": "activations",
    "working": "running",
    "sum": "sum",
}


def memory(job: ConfiguredJob) -> Section:
    """The section on the memory of a worker of each stage, which only a profile knows."""
    title = "Memory of a worker"
    if job.profile is None:
        return Section(
            "memory",
            title,
            None,
            ("not known without a profile: recycle profile --out FILE measures one, --profile FILE takes it",),
        )
    rows, device = held_bytes(job), job.profile.device_bytes
    parts = [part for part in PARTS if part != "blocks" or job.settings.exact]
    table = [
        ("stage", *map(PARTS.get, parts)),
        *((str(stage), *(gib(row[part]) for part in parts)) for stage, row in enumerate(rows)),
    ]
    has = "the profile does not say how much the device has" if device is None else f"the device has {gib(device)}"
    lines = (
        f"{has}; kept: boundary tensors of two steps, after one loss"
        + "; blocks: exact mode's sums" * job.settings.exact,
        "activations: at the cap; running: what an instruction needs, an estimate",
    )
    wrong = _too_much(rows, device) if device is not None else ()
    return Section(
        "memory",
        title,
        {"device": device, "stages": rows},
        lines,
        wrong,
        tuple(aligned(table, tuple(range(1, len(table[0]))))),
    )


def _too_much(rows: list[dict], device: int) -> tuple[str, ...]:
    """One line for all stages that don't fit, with the cap that would do, where one does."""
    over = [stage for stage, row in enumerate(rows) if row["sum"] > device]
    if not over:
        return ()
    held = min(
        (device - rows[stage]["sum"] + rows[stage]["activations"]) // max(1, rows[stage]["each"]) for stage in over
    )
    smaller = f", or set {SECTION}.activation_cap to {held}" if held >= 1 else ""
    return (f"{stages_text(over)}: {gib(max(row['sum'] for row in rows))} of {gib(device)}; use more stages{smaller}",)


def held_bytes(job: ConfiguredJob) -> list[dict]:
    """Bytes that a worker of each stage holds, by what for; ``each``: of one micro-batch, ``sum``: of all.

    ``kept``: boundary tensors stay until their step is committed, and two steps may be under way.
    """
    profile, stages, policy = job.profile, job.stages, job.policy
    state, working = profile.state_bytes(stages), profile.working_bytes(stages)
    both, parts = profile.state_bytes(stages, job.settings.undo), profile.parts(stages)
    rows = []
    for stage in range(stages):
        each = max(job.costs.activation_bytes[stage], job.costs.pending_bytes[stage] * policy.split_backward)
        room = policy.memory_bytes[stage] if isinstance(policy.memory_bytes, tuple) else policy.memory_bytes
        most = each * (job.busiest if room is not None else min(job.busiest, policy.cap(stage, stages)))
        made = (stage > 0) + (stage < stages - 1)
        blocks = (
            4 * sum(part.parameters for part in parts[stage]) * (job.busiest_blocks(policy.block) - 1)
            if job.settings.exact
            else 0
        )
        row = {
            "each": each,
            "state": state[stage],
            "undo": both[stage] - state[stage],
            "blocks": blocks,
            "kept": 2 * made * job.busiest * profile.boundary_bytes,
            "activations": most if room is None else min(most, room),
            "working": working[stage],
        }
        rows.append(row | {"sum": sum(row[part] for part in PARTS if part != "sum")})
    return rows


def gib(size: int) -> str:
    """Bytes in words, as GiB."""
    return f"{size / (1 << 30):.2f} GiB"
