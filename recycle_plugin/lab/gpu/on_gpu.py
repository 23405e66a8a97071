"""Try the plugin on one GPU, in stages: correctness under kills, precision, races, and figures.

scripts/on_gpu --pack DIR                        # on a machine with a package index: collect wheels into DIR/part-N
scripts/on_gpu --wheels DIR --out runs/on_gpu    # on the machine with the GPU: install them beside its torch, and run
scripts/on_gpu --out runs/on_gpu                 # the same if this checkout is or can be installed there
scripts/on_gpu --out DIR --device cpu            # a rehearsal without a GPU: everything small, no figure means anything

A call takes --minutes at most.  Stages that do not fit are left for the next call with the same --out; a stage that has
a result from the same sources does not run again.  report.md and report.json in --out are rewritten after each stage.

Exit code: 0 if all requested stages have run and passed, 1 if something has failed, 2 for bad input, 69 without a GPU
(nothing was run), 75 if stages are left: call it again.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from recycle_plugin import folders
from recycle_plugin.lab.checks.installed import first_line, installed, name_of
from recycle_plugin.lab.checks.killed import on_device
from recycle_plugin.lab.checks.rows import MARKS, Row, all_passed
from recycle_plugin.lab.gpu.stages import STAGES, GpuStage
from recycle_plugin.lab.runs import JobRun, RunFailed, terminable
from recycle_plugin.runtime.devices.host import HOST
from recycle_plugin.runtime.devices.kinds import kinds

NO_GPU, LEFT, BAD, MINUTES = 69, 75, 2, 9.0
CHECKOUT = Path(__file__).resolve().parents[3]
END_S = 25.0  # of a call, for a stage to end and for the report


def markdown(rows: Sequence[Row]) -> list[str]:
    """Return the rows as the lines of a table in Markdown."""
    cells = ((MARKS[row.passed], row.name, row.said.replace("|", "\\|")) for row in rows)
    return ["| | what | found |", "|---|---|---|", *(f"| {' | '.join(line)} |" for line in cells)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the requested stages that have no result yet, and return the exit code."""
    found = parser().parse_args(arguments)
    here = kinds()
    device = found.device or here[-1]
    if device not in here or (device == HOST.type and found.device is None):
        print(
            f"on_gpu: NO GPU: torch finds only {' and '.join(here)} here, and NOTHING WAS RUN; "
            "run it on a machine with one, or rehearse with --device cpu",
            file=sys.stderr,
        )
        return NO_GPU
    if not found.minutes > 0:
        print(f"on_gpu: --minutes {found.minutes:g}: write a number above 0", file=sys.stderr)
        return BAD
    wanted = [STAGES[name] for name in found.stage or STAGES]
    try:
        found.out.mkdir(parents=True, exist_ok=True)
        with terminable():
            return OnGpuCall(found.out.resolve(), device, time.monotonic() + 60 * found.minutes).run(wanted)
    except OSError as error:
        print(f"on_gpu: --out {found.out}: {error.strerror or error}", file=sys.stderr)
        return BAD
    except KeyboardInterrupt:
        print("on_gpu: interrupted; what has a result stays, the next call goes on from there", file=sys.stderr)
        return 130


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line, without the options that scripts/on_gpu handles itself."""
    made = argparse.ArgumentParser(
        prog="on_gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--out", type=Path, required=True, metavar="DIR", help="results, and the report")
    made.add_argument(
        "--stage",
        action="append",
        choices=list(STAGES),
        metavar="NAME",
        help="only this; may be given several times: " + ", ".join(STAGES),
    )
    made.add_argument("--minutes", type=float, default=MINUTES, help=f"that this call may take (default: {MINUTES})")
    made.add_argument("--device", metavar="KIND", help="cpu: a rehearsal (default: the accelerator)")
    return made


class OnGpuCall:
    """One call: stages run into ``out`` until ``until``, by time.monotonic."""

    def __init__(self, out: Path, device: str, until: float) -> None:
        self._out, self._device, self._until = out, device, until
        self._about = about(device)

    def run(self, wanted: Sequence[GpuStage]) -> int:
        """Run the stages without a result, and return the exit code."""
        left = []
        for stage in wanted:
            if self._result(stage.name) is not None:
                say(f"{stage.name}: there already, from the same sources")
            elif not self._try(stage):
                left.append(stage.name)
            self._report(left)
        self._report(left)
        results = [self._result(stage.name) for stage in wanted]
        failed = [each["stage"] for each in results if each and not each["passed"]]
        say(f"report: {self._out / 'report.md'}")
        if failed:
            say(f"FAILED: {', '.join(failed)}")
        if left:
            say(f"left for the next call: {', '.join(left)}")
        return 1 if failed else LEFT if left else 0

    def _result(self, name: str) -> dict[str, Any] | None:
        """Return a stage's result from these sources and this device, or None."""
        try:
            found = json.loads((self._out / f"{name}.json").read_text())
        except (OSError, ValueError):
            return None
        same = all(found.get(key) == self._about[key] for key in ("sources", "device", "torch"))
        return found if same else None

    def _try(self, stage: GpuStage) -> bool:
        """Run a stage if the remaining time allows, and return whether it has a result now."""
        left_s = self._until - time.monotonic() - END_S
        if left_s < stage.estimate_s:
            say(f"{stage.name}: takes about {stage.estimate_s:g} s, and {max(left_s, 0):.0f} s are left")
            return False
        say(f"{stage.name} ...")
        began, deadline_s = time.monotonic(), min(stage.deadline_s, left_s)
        rows = self._rows(stage.name, deadline_s)
        if rows is None and deadline_s < stage.deadline_s:
            say(f"{stage.name}: ended after {deadline_s:.0f} s, the last of this call; the next one begins it anew")
            return False
        if rows is None:
            rows = [Row(stage.name, False, f"no result after {deadline_s:.0f} s", f"see {stage.name}/output.txt")]
        result = {
            "stage": stage.name,
            "passed": all_passed(rows),
            "seconds": round(time.monotonic() - began, 1),
            **self._about,
            "rows": [row.as_data() for row in rows],
        }
        folders.put(self._out / f"{stage.name}.json", json.dumps(result, indent=1))
        say(f"{stage.name}: {'passed' if result['passed'] else 'FAILED'}, {result['seconds']:g} s")
        return True

    def _rows(self, name: str, deadline_s: float) -> list[Row] | None:
        """Return the rows of a stage, run in its own process; None after the deadline."""
        folder = self._out / name
        rows = folder / "rows.json"
        rows.unlink(missing_ok=True)
        options = ["--out", str(self._out), "--device", self._device, "--rows", str(rows)]
        command = [sys.executable, "-m", "recycle_plugin.lab.gpu.stages", name, *options]
        with JobRun(folder, command, on_device(self._device)) as run:
            try:
                run.wait_for(rows.exists, "its rows", deadline_s)
            except RunFailed:
                ended = run.launcher.poll()
                run.end()
                if ended is None:
                    return None
                last = run.output.strip().splitlines()[-1:] or ["nothing"]
                return [Row(name, False, f"its process has ended with {ended}: {last[0]}", f"see {name}/output.txt")]
        return [Row(**row) for row in json.loads(rows.read_text())]

    def _report(self, left: Sequence[str]) -> None:
        results = [result for name in STAGES if (result := self._result(name)) is not None]
        folders.put(
            self._out / "report.json", json.dumps({**self._about, "stages": results, "left": list(left)}, indent=1)
        )
        folders.put(self._out / "report.md", "\n".join(report(self._about, results, left)) + "\n")


def report(about: Mapping[str, str], results: Sequence[Mapping[str, Any]], left: Sequence[str]) -> list[str]:
    """Return the lines of report.md."""
    lines = ["# One GPU, four processes", ""]
    if about["device"] == HOST.type:
        lines += ["**A rehearsal on a CPU: nothing here was measured on a GPU, and no figure means anything.**", ""]
    lines += [f"* {name}: {value}" for name, value in about.items()]
    for result in results:
        mark = "passed" if result["passed"] else "FAILED"
        rows = [Row(**row) for row in result["rows"]]
        lines += ["", f"## {result['stage']}: {mark}, {result['seconds']:g} s, {result['date']}", "", *markdown(rows)]
    return lines + (["", f"Left for the next call: {', '.join(left)}."] if left else [])


def about(device: str) -> dict[str, str]:
    """Return the labels of results: device, driver, releases, date, and sources."""
    return {
        "device": name_of(torch.device(device)),
        **installed(device),
        "date": datetime.date.today().isoformat(),
        "commit": first_line("git", "-C", str(CHECKOUT), "describe", "--always", "--dirty", "--abbrev=12"),
        "sources": sources(),
    }


def sources() -> str:
    """Return a hash of all sources that the stages run; it needs no git."""
    folders = ("recycle_plugin", "patches", "configs", "scripts")
    files = sorted(path for name in folders for path in (CHECKOUT / name).rglob("*") if path.suffix in (".py", ".yaml"))
    whole = hashlib.sha256()
    for path in files:
        whole.update(f"{path.relative_to(CHECKOUT)}\n".encode() + path.read_bytes())
    return whole.hexdigest()[:12]


def say(line: str) -> None:
    """Print a line on the progress."""
    print(f"on_gpu: {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
