"""Two sections of ``recycle doctor``: which losses a job survives, and what each kind of loss costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from recycle_plugin.commands.config_job import ONE_HOST, ConfiguredJob, at_risk
from recycle_plugin.commands.doctor_section import Section, aligned, ms, times
from recycle_plugin.commands.losses import NAMED, clipped, host_cases, stages_text, worker_cases
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.placement import remedy
from recycle_plugin.settings.wording import SECTION

ROWS = 8  # most hosts in a table: --json has all


def survival(job: ConfiguredJob) -> Section:
    risky = at_risk(job.hosts)
    rows = [_host(job, host, risky.get(host, ())) for host in job.hosts]
    each, workers = (job.replicas - 1) * job.survives, len(job.shape.seats)
    lines = ["workers: none"]
    logs = job.settings.log is not None
    ends = [] if job.survives_first_host else ["the host of rank 0, which runs the coordinator"]
    if logs:
        last = "replayed from the logs, while all others wait: a stage's last worker"
        lines = ["; ends it: ".join([last, *ends])]
    if job.survives:
        left = "one is left in every stage" if job.settings.unit == "worker" else "one replica is left whole"
        count = f"workers: any {each}; at best {each * job.stages} of {workers}, if {left}"
        lines = [count, *(lines if logs else ["; ".join(["ends it: a stage's last worker", *ends])])]
    if len(rows) == 1:
        lines.append("hosts: none, all ranks are on one" + " (no --hostfile given)" * (ONE_HOST in job.hosts))
    if job.survives_first_host:
        lines.append("the host of rank 0: another host takes over; but SLURM ends a job that loses its batch host")
    if job.spare_slots:
        lines.append(
            f"slots: {job.spare_slots} more than workers; launch with --num_nodes or --num_gpus to leave them out"
        )
    data = {"any_workers": each, "at_best_workers": each * job.stages, "workers": workers, "hosts": rows}
    table = tuple(_host_table(rows)) if len(rows) > 1 else ()
    return Section("survives", "What it survives", data, tuple(lines), tuple(_weak(job, risky)), table)


def _host(job: ConfiguredJob, host: str, risky: tuple[int, ...]) -> dict:
    """Return a row of the table of hosts; ``ends``: why the host's loss ends the job, "" if it does not."""
    seats = job.hosts[host]
    ranks = [seat.stage * job.replicas + seat.replica for seat in seats]
    reasons = ["coordinator"] * (ranks[0] == 0 and not job.survives_first_host) + [
        f"all of {stages_text(risky)}"
    ] * bool(risky)
    if not risky and job.survives and job.ends(seats):
        reasons.append("a worker of every replica")
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
    if job.replicas == 1 and job.settings.log is None:
        yield (
            "--dp 1: a lost worker has no peer to take its micro-batches, and the plugin refuses it; "
            f"use two replicas or more, or set {SECTION}.log, so that a stage without a replica can be replayed"
        )
    elif risky and (len(job.hosts) > 1 or job.settings.placement == "strict"):
        refuses = f'; {SECTION}.placement "strict" refuses to start' if job.settings.placement == "strict" else ""
        held = "; ".join(
            f"{clipped(host)} holds every replica of {stages_text(stages)}"
            for host, stages in list(risky.items())[:NAMED]
        )
        more = f"; so do {len(risky) - NAMED} hosts more with other stages" if len(risky) > NAMED else ""
        yield f"{held}{more}{refuses}: {_mend(job)}"


def _mend(job: ConfiguredJob) -> str:
    """Return advice on how to put the replicas of each stage on different hosts."""
    return remedy(Counter({clipped(host): len(seats) for host, seats in job.hosts.items()}), job.shape)


def slowdown(job: ConfiguredJob) -> Section:
    """Return the section on the cost of each kind of loss, with one plan for each. Raises PlanError."""
    free, _ = job.planned()
    nobody = _row(job, "nobody", (), free)
    rows, hosts, each = [nobody], [], []
    if job.survives:
        rows += [_row(job, name, lost, free) for name, lost in worker_cases(job)]
        hosts = [_row(job, name, job.hosts[alike[0]], free) | {"hosts": alike} for name, alike in host_cases(job)]
        hosts.sort(key=lambda row: -row["slowdown"])
        each = [round(job.planned((Seat(0, stage),))[0] / free, 4) for stage in range(job.stages)]
    lines = []
    if job.policy.shrinks:
        lines.append("of steps that have only the live replicas' micro-batches: for samples see the next table")
    if len(hosts) > ROWS:
        lines.append(f"of {len(hosts)} kinds of host the {ROWS} worst are shown: --json has all")
    table = [("lost", "step", "slower", "bound")]
    for row in [*rows, *hosts[:ROWS]]:
        table.append((row["lost"], ms(row["period_us"]), times(row["slowdown"]), times(row["bound"])))
    data = {"each_stage": each, "cases": [*rows, *hosts]}
    return Section("slowdown", "Predicted slowdown", data, tuple(lines), table=tuple(aligned(table, (1, 2, 3))))


def _row(job: ConfiguredJob, name: str, lost: tuple[Seat, ...], free: int) -> dict:
    period, bound = job.planned(lost)
    return {
        "lost": name,
        "seats": list(map(str, lost)),
        "period_us": period,
        "bound_us": bound,
        "slowdown": round(period / free, 4),
        "bound": round(bound / free, 4),
    }
