"""Try a cluster with a small job under its own launcher: releases, clocks, placement, links, deadlines, kills.

scripts/check_cluster --out DIR -- deepspeed --hostfile hosts.txt --module recycle_plugin.launch
scripts/check_cluster --out DIR -- srun --no-kill --ntasks-per-node 4 python -u -m recycle_plugin.launch
scripts/check_cluster --out DIR              # on this host alone: four workers under the plugin's own launcher

After "--" write the command that starts your jobs, without the script and its arguments.  It is run once without a
failure, and once for each kill of a worker of the second stage at a named instruction.  All hosts and this one have to
see DIR.  The table is printed, and written to DIR/check.txt and DIR/check.json: send these two back.

Exit code: 0 if all has passed, 1 if a row has failed, 2 for bad input.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from recycle_plugin.commands.config_job import config_of, job_of
from recycle_plugin.commands.doctor_losses import slowdown, survival
from recycle_plugin.core.vocabulary.deadlines import Deadlines
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.lab.checks.killed import MOMENTS, StartedJob, failed, kill_list, killed_itself, outcome
from recycle_plugin.lab.checks.rows import Row, all_passed, judged, table
from recycle_plugin.lab.runs import RunFailed, terminable
from recycle_plugin.settings.schema import Settings
from recycle_plugin.settings.wording import SECTION
from recycle_plugin.versions import releases

ALONE = (sys.executable, "-m", "recycle_plugin.launch", "--workers", "4")
JOB_S = 300.0  # limit for each small job, in seconds, including its start
OFF_S = 1.0  # with clocks further apart, times of different hosts mean nothing
TRIPS = 50  # a deadline has to be longer than so many worst round trips
SHARED = "give --out a folder that all hosts and this one share"
TOLD = ("placement", *(field.name for field in dataclasses.fields(Deadlines)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Try the cluster, print the table, and return the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    own, launcher = (given[: given.index("--")], given[given.index("--") + 1 :]) if "--" in given else (given, [])
    found = parser().parse_args(own)
    try:
        section = section_of(found.config)
        settings = Settings.from_section(section)
        command = checked(launcher)
        if not found.seconds > 0:
            raise ValueError(f"--seconds {found.seconds:g}: write a number above 0")
        out = found.out.resolve()
        out.mkdir(parents=True, exist_ok=True)
        with terminable():
            rows, sections = tried(StartedJob(command, dict(os.environ), found.seconds), out, section, settings)
        text = "\n".join([f"check_cluster, {' '.join(command)}", "", *table(rows), *sections])
        (out / "check.txt").write_text(text + "\n")
        (out / "check.json").write_text(
            json.dumps(
                {"command": command, "passed": all_passed(rows), "rows": [row.as_data() for row in rows]}, indent=1
            )
        )
    except (ValueError, OSError) as error:
        print(f"check_cluster: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("check_cluster: interrupted; its job was ended, and there is no table", file=sys.stderr)
        return 130
    print(f"{text}\n\nsend back {out / 'check.txt'} and {out / 'check.json'}")
    return int(not all_passed(rows))


def parser() -> argparse.ArgumentParser:
    """Return the parser of the arguments before "--"."""
    made = argparse.ArgumentParser(
        prog="check_cluster", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--out", type=Path, required=True, metavar="DIR", help="run folders, and the table")
    made.add_argument(
        "--config",
        metavar="FILE",
        help=f'your DeepSpeed JSON; of its "{SECTION}" section only deadlines and placement are used',
    )
    made.add_argument(
        "--seconds", type=float, default=JOB_S, metavar="S", help=f"that each job may take (default: {JOB_S:g})"
    )
    return made


def section_of(path: str | None) -> dict[str, Any]:
    """Return the settings of the small jobs: the relevant ones of a config, and no rejoin. Raises ValueError."""
    section = {} if path is None else config_of(path).get(SECTION) or {}
    Settings.from_section(section)
    return {"enabled": True, "rejoin": "never", **{name: section[name] for name in TOLD if name in section}}


def checked(launcher: Sequence[str]) -> list[str]:
    """Return the launcher's command. Raises ValueError if it can't start a job with the plugin."""
    if not launcher:
        return list(ALONE)
    if shutil.which(launcher[0]) is None:
        raise ValueError(f'{launcher[0]} is not in PATH here: put the command that starts your jobs after "--"')
    if not any("recycle_plugin" in word for word in launcher):
        raise ValueError(
            f"{' '.join(launcher)} does not name recycle_plugin.launch, without which a job survives nothing: write "
            "-- deepspeed --hostfile hosts.txt --module recycle_plugin.launch"
        )
    return list(launcher)


def tried(
    started: StartedJob, out: Path, section: Mapping[str, Any], settings: Settings
) -> tuple[list[Row], list[str]]:
    """Return all rows, and the doctor's lines on the placement that was found."""
    config = out / "ds_config.json"
    section_of_file = {**section, "secret_file": str(out.resolve() / "secret")}  # all hosts have this folder
    config.write_text(
        json.dumps({"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, SECTION: section_of_file})
    )
    told = ["--settings", json.dumps(section), "--deepspeed_config", str(config)]
    healthy, measured = out / "healthy", out / "measured.json"
    measured.unlink(missing_ok=True)
    print("a job without a failure ...", file=sys.stderr, flush=True)
    try:
        with started.run(healthy, "--measure", str(measured), *told) as run:
            reference = outcome(run, started.deadline_s)
    except RunFailed as error:
        return [failed("a job without a failure", error, healthy)], []
    if not reference.curve or not measured.exists():
        return [Row("a job without a failure", False, f"the job wrote nothing to {out}", SHARED)], []
    found = json.loads(measured.read_text())
    rows = [Row("a job without a failure", True, f"{len(found['workers'])} workers, {len(reference.curve)} steps")]
    rows += [versions(found["workers"]), clocks(found), *links(found), *devices(found["workers"])]
    kills = kill_list(started, out / "kills", reference, list(MOMENTS), killed_itself, told)
    survives, sections = placed(found["workers"], config)
    return [*rows, survives, deadlines(settings, found), *kills], sections


# --- what the workers have measured -------------------------------------------------------------------


def versions(workers: Sequence[Mapping[str, Any]]) -> Row:
    """Judge whether all hosts have the same releases, and releases that the plugin is written for."""
    wrong = [one.wrong for one in releases() if not one.fits]
    shown = []
    for name in workers[0]["versions"]:
        by_version: dict[str, set[str]] = {}
        for worker in workers:
            by_version.setdefault(worker["versions"][name], set()).add(worker["host"])
        shown.append(f"{name} {next(iter(by_version))}")
        if len(by_version) > 1:
            differ = (f"{version} on {', '.join(sorted(hosts))}" for version, hosts in sorted(by_version.items()))
            wrong.append(f"{name} is {' and '.join(differ)}")
    advice = "install the same on all hosts"
    return judged("versions", "; ".join(wrong), f"alike on all hosts: {', '.join(shown)}", advice)


def clocks(found: Mapping[str, Any]) -> Row:
    """Judge whether the hosts' clocks agree well enough for times in logs."""
    worst = max(abs(link["clock_ms"]) for link in found["links"].values())
    wrong = f"clocks differ by {worst:.0f} ms" if worst > 1e3 * OFF_S else ""
    return judged("clocks", wrong, f"at most {worst:.2f} ms apart", "have NTP set them", ms=worst)


def links(found: Mapping[str, Any]) -> Iterator[Row]:
    """Yield a row for each pair of hosts that was measured."""
    host = {worker["rank"]: worker["host"] for worker in found["workers"]}
    for name, link in found["links"].items():
        one, other = map(int, name.split("-"))
        text = f"round trip {link['round_trip_ms']:g} ms (worst {link['worst_ms']:g}), {link['gb_s']:g} GB/s over Gloo"
        yield Row(f"link: {host[one]} - {host[other]}", None, text, figures=link)


def devices(workers: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    """Yield a row for each host's devices."""
    for host in dict.fromkeys(worker["host"] for worker in workers):
        here = [worker for worker in workers if worker["host"] == host]
        name = ", ".join(sorted({worker["device"] for worker in here}))
        yield Row(f"device: {host}", None, f"{len(here)} workers on {name}, {here[0]['cores']} cores")


def placed(workers: Sequence[Mapping[str, Any]], config: Path) -> tuple[Row, list[str]]:
    """Judge whether the job as placed survives a host's loss. Return the row, and the doctor's lines on it."""
    arguments = argparse.Namespace(
        config=str(config), pp=2, dp=len(workers) // 2, micro_batches=None, hostfile=None, profile=None
    )
    hosts: dict[str, tuple[Seat, ...]] = {}
    for worker in sorted(workers, key=lambda worker: worker["rank"]):
        hosts[worker["host"]] = (*hosts.get(worker["host"], ()), Seat.parse(worker["seat"]))
    job = dataclasses.replace(job_of(arguments), hosts=hosts)
    section = survival(job)
    text = "; ".join(section.lines)
    row = judged("placement", "; ".join(section.wrong), text, "see below", hosts=section.data["hosts"])
    return row, [*section.text(), *slowdown(job).text()]


# --- deadlines ---------------------------------------------------------------------------------------


def deadlines(settings: Settings, found: Mapping[str, Any]) -> Row:
    """Judge whether the deadlines are long enough for the measured links."""
    worst = max(link["worst_ms"] for link in found["links"].values()) / 1e3
    silent = settings.heartbeat_timeout_s
    return judged(
        "heartbeat_timeout_s",
        f"{silent:g} s is less than {TRIPS} times the worst round trip ({worst:.3f} s)"
        if silent < TRIPS * worst
        else "",
        f"{silent:g} s, the worst round trip is {worst:.4f} s",
        f"raise it to {TRIPS * worst:.0f}, or mend the network",
    )


if __name__ == "__main__":
    sys.exit(main())
