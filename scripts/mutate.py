#!/usr/bin/env python
"""Would the tests see it?

Makes mechanical mistakes in recycle_plugin/core, one at a time, and looks for who finds them.

    scripts/mutate.py --out runs/mutants.jsonl                         # 150 mutants, the first seed that fails of up to
    500 scripts/mutate.py --out runs/mutants.jsonl --mutants 40 --jobs 2   # the first 40 of the same ones
    scripts/mutate.py --out runs/before.jsonl --checkout ../before     # the same mutants in another checkout, by its
    own tests scripts/mutate.py --list                                           # what would be made; --only TEXT:
    those with it in their name scripts/mutate.py --out runs/mutants.jsonl --report                # only print what is
    in the file

What a mutant is, scripts/mutants.py says.  Each is tried first by the unit tests of core (those that import its module
first), then by the campaign's seeds from 0 on, then by a few of its instants; what fails without a mutant too does not
count.  A test or a seed that takes longer than --deadline seconds of CPU has found it as well: it would not have ended.

Mutants are made in forks of one warm process, in a copy of the checkout, by giving a loaded function other code; no
file is changed. One JSON line each goes to --out, and what is there is not tried again, so that an interrupted run goes
on where it was.  At the end: the score, a table, and each survivor with its reason from scripts/mutants.json
("unexplained" where that has none).
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import re
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mutants import KINDS, Mutant, install, mutants, sample

HERE = Path(__file__).resolve()
REASONS = HERE.with_suffix(".json").with_name("mutants.json")
CORE = "recycle_plugin/core"
ALWAYS = (  # of tests/pure
    "membership",
    "leaving",
    "complaints",
    "training_loop",
    "step_figures",
    "data_cursor",
    "barriers",
    "throughput",
    "verify",
    "replica_check",
    "step_validation",
    "ties",
    "checkpoint_interval",
    "core_forms",
    "straggler_detector",
    "simulator",
    "failure_detector",
    "broken_apart",
    "suspicions",
    "standstill",
    "scripts_end",
    "simulator_profile",
    "roster",
    "incarnations",
    "shards",
    "job_spec",
    "step_store",
    "iterator_data",
)
IF_IMPORTED = (
    "iterator_draws",
    "placement",
    "render",
    "recovery_plan",
    "planner",
    "planner_wide",
    "simulator_failures",
    "state_dump",
    "tests/cli/test_profile.py",
)  # they take longer
EVERY = 61  # of the campaign's instants, every so many
SILENCE_S = 1800  # of one attempt, by the clock: longer than its deadline takes on a busy machine
MEMORY = 6 << 30  # what an attempt may take beyond what it starts with


@dataclass(frozen=True)
class Units:
    """Test files and what of them is left out; seeds to be run, and whether some instants are; ``deadline_s``: of each
    test and seed, of CPU.
    """

    files: tuple[str, ...]
    without: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    instants: bool = False
    deadline_s: float = 60.0


# --- one attempt, in a process of its own ----------------------------------------------------------------


class Reporter:
    """Says through a pipe what runs, and who has found something.  A plugin of pytest's."""

    def __init__(self, pipe: int, deadline_s: float) -> None:
        self._pipe, self._deadline_s = pipe, deadline_s
        self.found: list[str] = []

    def tell(self, kind: str, what: str) -> None:
        os.write(self._pipe, (json.dumps([kind, what]) + "\n").encode())

    def begin(self, what: str) -> None:
        signal.setitimer(signal.ITIMER_VIRTUAL, self._deadline_s)  # nobody catches it: it ends the process
        self.tell("runs", what)

    def pytest_configure(self) -> None:
        """Behind the tests' own settings: a failure is enough, it need not be the smallest."""
        from hypothesis import HealthCheck, Phase, settings

        settings.register_profile(
            "mutants",
            phases=[Phase.explicit, Phase.generate],
            deadline=None,
            derandomize=True,
            database=None,
            max_examples=60,
            suppress_health_check=list(HealthCheck),
        )
        settings.load_profile("mutants")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.begin(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.found.append(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.found.append(f"{report.nodeid} (can't be imported)")


def attempt(change: Callable[[], None], units: Units, all_of_them: bool, out: Reporter) -> None:
    """Make the change and tell who finds it; the first, or ``all_of_them``."""
    import pytest

    forget()
    change()
    out.begin("the tests' collection")
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-o",
        "timeout=0",
        *(f"--deselect={test}" for test in units.without),
        *([] if all_of_them else ["-x"]),
    ]
    if units.files:
        pytest.main([*options, *units.files], plugins=[out])
    for test in out.found:
        out.tell("unit", test)
    if out.found and not all_of_them:
        return
    if (seeds_find(units, all_of_them, out) and not all_of_them) or not units.instants:
        return
    from recycle_plugin.lab.simulator import campaign

    out.begin("every instant")
    for outcome in campaign.every_instant(campaign.LOSS, EVERY).violations[:1]:
        out.tell("instant", outcome.name)


def seeds_find(units: Units, all_of_them: bool, out: Reporter) -> bool:
    found = False
    for seed in units.seeds:
        from recycle_plugin.lab.simulator import campaign

        out.begin(f"--seed {seed}")
        try:
            fails = bool(campaign.run_seed(seed).violations)
        except Exception:  # what the mutant has broken is the campaign's own preparation
            fails = True
        if fails:
            found = True
            out.tell("seed", f"--seed {seed}")
            if not all_of_them:
                break
    return found


def forget() -> None:
    """What the warm process has kept of answers."""
    for name, module in list(sys.modules.items()):
        if name.startswith("recycle_plugin"):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


@dataclass
class Attempt:
    """A running one, as its parent sees it."""

    pid: int
    pipe: int
    started: float
    text: str = ""

    def read(self) -> bool:
        """Whether there may be more."""
        part = os.read(self.pipe, 1 << 16).decode()
        self.text += part
        return bool(part)

    def end(self) -> dict:
        """What it has told, once it has ended: found (by what kind), by (whom), cpu_s, and with all_of_them
        everybody.
        """
        os.close(self.pipe)
        _, status, usage = os.wait4(self.pid, 0)
        told = [json.loads(line) for line in self.text.splitlines()]
        found = [(kind, what) for kind, what in told if kind != "runs"]
        last = next((what for kind, what in reversed(told) if kind == "runs"), "its start")
        if os.WIFSIGNALED(status) and not found:
            found = (
                [("deadline", last)] if os.WTERMSIG(status) in (signal.SIGVTALRM, signal.SIGKILL) else [("crash", last)]
            )
        first = found[0] if found else (None, None)
        return {
            "found": first[0],
            "by": first[1],
            "all": [what for _, what in found],
            "cpu_s": round(usage.ru_utime + usage.ru_stime, 2),
        }


def begin(change: Callable[[], None], units: Units, all_of_them: bool = False) -> Attempt:
    """Fork one."""
    mine, theirs = os.pipe()
    pid = os.fork()
    if pid:
        os.close(theirs)
        return Attempt(pid, mine, time.monotonic())
    try:
        signal.signal(signal.SIGVTALRM, signal.SIG_DFL)
        resource.setrlimit(
            resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2 if sys.gettrace() else (_memory() + MEMORY,) * 2
        )
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 1)
            os.dup2(nothing.fileno(), 2)
        out = Reporter(theirs, units.deadline_s)
        try:
            attempt(change, units, all_of_them, out)
        except BaseException:
            out.tell("crash", traceback.format_exc(limit=-2))
    finally:
        os._exit(0)


def _memory() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def run(
    work: Iterator[tuple[Any, Callable[[], None], Units]], jobs: int, all_of_them: bool = False
) -> Iterator[tuple[Any, dict]]:
    """Each piece of work and what came of it, ``jobs`` at a time."""
    under_way: dict[int, tuple[Any, Attempt]] = {}
    work = iter(work)
    try:
        while True:
            while len(under_way) < jobs and (piece := next(work, None)):
                made = begin(piece[1], piece[2], all_of_them)
                under_way[made.pipe] = piece[0], made
            if not under_way:
                return
            ready = select.select(list(under_way), [], [], 10)[0]
            for pipe in ready:
                if not under_way[pipe][1].read():
                    key, ended = under_way.pop(pipe)
                    yield key, ended.end()
            for _, late in under_way.values():
                if time.monotonic() - late.started > SILENCE_S:
                    os.kill(late.pid, signal.SIGKILL)
    finally:
        for _, made in under_way.values():
            os.kill(made.pid, signal.SIGKILL)
            made.end()


# --- all of them -----------------------------------------------------------------------------------------


def enter(checkout: Path, scratch: Path) -> None:
    """Go to a copy of the checkout, and warm up there."""
    for name in ("recycle_plugin", "configs", "patches", "tests", "setup.cfg", "pyproject.toml"):
        source = checkout / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, scratch / name, **({"ignore": shutil.ignore_patterns("__pycache__")} if source.is_dir() else {}))
    os.chdir(scratch)
    sys.path.insert(0, str(scratch))
    sys.dont_write_bytecode = True
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401

    from recycle_plugin import planner
    from recycle_plugin.lab.simulator import campaign

    assert Path(planner.__file__).is_relative_to(scratch), f"{planner.__file__} is not of the copy"
    planner.warm()
    campaign.run_seed(0)
    for path in sorted(Path(CORE).rglob("*.py")):
        importlib.import_module(module_of(path))


def tests_for(module: str | None) -> tuple[str, ...]:
    """The files of unit tests, those that import ``module`` first; None: all of them."""
    files = {
        name: path
        for name in (*ALWAYS, *IF_IMPORTED)
        if (path := Path(f"tests/pure/test_{name}.py" if "/" not in name else name)).is_file()
    }
    package, _, stem = (module or "").rpartition(".")
    imports = re.compile(rf"^from {module} import|^from {package} import .*\b{stem}\b", re.MULTILINE)
    first = [name for name, path in files.items() if module is None or imports.search(path.read_text())]
    return tuple(
        str(files[name]) for name in (*first, *(name for name in files if name in ALWAYS and name not in first))
    )


def digest() -> str:
    """Of everything that a result depends on."""
    found = hashlib.sha256()
    for path in sorted(
        [*Path("recycle_plugin").rglob("*.py"), *Path("tests/pure").rglob("*.py"), *Path("tests/support").rglob("*.py")]
    ):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def known(out: Path, state: str) -> tuple[dict, dict[str, dict]]:
    """The file's head and its results by the mutants' names.  Raises SystemExit where it is of other code."""
    lines = [json.loads(line) for line in out.read_text().splitlines()] if out.is_file() else []
    if lines and lines[0]["state"] != state:
        raise SystemExit(f"{out} is of other code or tests ({lines[0]['state']}, these are {state}): name another file")
    return (lines[0] if lines else {}), {line["name"]: line for line in lines[1:]}


def hunt(found: argparse.Namespace, chosen: list[Mutant], sources: dict[str, str], out: Path) -> dict[str, dict]:
    """Try all that are not in the file yet."""
    state = digest()
    head, results = known(out, state)
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a", buffering=1) as file:
        if not head:
            units = Units(tests_for(None), (), tuple(range(found.seeds)), True, 10 * found.deadline)
            ((_, calm),) = run(iter([(None, lambda: None, units)]), 1, all_of_them=True)
            head = {
                "state": state,
                "fails_without": calm["all"],
                "cpu_s": calm["cpu_s"],
                "checkout": str(found.checkout),
            }
            file.write(json.dumps(head) + "\n")
        print(
            f"without a mutant: {', '.join(head['fails_without']) or 'nothing fails'} ({head['cpu_s']:.0f} s of CPU)",
            flush=True,
        )
        bad = set(head["fails_without"])
        seeds = () if found.only_unit else tuple(seed for seed in range(found.seeds) if f"--seed {seed}" not in bad)
        instants = not found.only_unit and not any(each.startswith("--kill") for each in bad)

        def work() -> Iterator[tuple[Mutant, Callable[[], None], Units]]:
            for mutant in chosen:
                if mutant.name not in results:
                    units = Units(
                        tests_for(mutant.module),
                        tuple(each for each in bad if "::" in each),
                        seeds,
                        instants,
                        found.deadline,
                    )
                    yield (
                        mutant,
                        lambda mutant=mutant: install(
                            sources[mutant.module], mutant, str(path_of(mutant.module).resolve())
                        ),
                        units,
                    )

        for mutant, result in run(work(), found.jobs):
            line = {
                "name": mutant.name,
                "where": where(mutant),
                "kind": mutant.kind,
                "before": mutant.before,
                "after": mutant.after,
            }
            results[mutant.name] = line | {key: result[key] for key in ("found", "by", "cpu_s")}
            file.write(json.dumps(results[mutant.name]) + "\n")
            print(
                f"{len(results):4} {line['where']} [{mutant.kind}]: {result['found'] or 'SURVIVES'} "
                f"{result['by'] or ''} ({result['cpu_s']:.0f} s)",
                flush=True,
            )
    return results


def where(mutant: Mutant) -> str:
    return f"{path_of(mutant.module)}:{mutant.line} {mutant.function}"


def module_of(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def path_of(module: str) -> Path:
    return Path(module.replace(".", "/") + ".py")


def reason(mutant: Mutant) -> str:
    for each in json.loads(REASONS.read_text()):
        if (each["module"], each["function"], each["before"], each["after"]) == (
            mutant.module,
            mutant.function,
            mutant.before,
            mutant.after,
        ):
            return each["reason"]
    return "unexplained"


def show(chosen: list[Mutant], results: dict[str, dict]) -> None:
    """The score, by module and kind, and the survivors."""
    tried = [(mutant, results[mutant.name]) for mutant in chosen if mutant.name in results]
    score = sum(bool(result["found"]) for _, result in tried)
    by = Counter(result["found"] for _, result in tried)
    spent = sum(result["cpu_s"] for _, result in tried)
    print(
        f"\n{score} of {len(tried)} mutants found, {score / max(1, len(tried)):.0%}: "
        + ", ".join(f"{by[kind]} by {kind}" for kind in sorted(filter(None, by)))
        + f"; {spent / max(1, len(tried)):.1f} s of CPU each"
    )
    print(f"\n{'found of made':<24}" + "".join(f"{kind:>20}" for kind in KINDS) + f"{'all':>12}")
    for module in (*sorted({mutant.module for mutant, _ in tried}), ""):
        cells = [
            [
                bool(result["found"])
                for mutant, result in tried
                if mutant.module.startswith(module) and kind in ("all", mutant.kind)
            ]
            for kind in (*KINDS, "all")
        ]
        shown = [f"{sum(cell)}/{len(cell)}" if cell else "" for cell in cells]
        print(
            f"{module.rpartition('.')[2] or 'all':<24}"
            + "".join(f"{each:>20}" for each in shown[:-1])
            + f"{shown[-1]:>12}"
        )
    for mutant, result in tried:
        if not result["found"]:
            print(f"\n{where(mutant)} [{mutant.kind}]\n  - {mutant.before}\n  + {mutant.after}\n  {reason(mutant)}")


def main(arguments: list[str]) -> int:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--mutants", type=int, default=150, metavar="N", help="so many (default 150)")
    made.add_argument("--seed", type=int, default=1, help="which ones (default 1)")
    made.add_argument(
        "--seeds",
        type=int,
        default=500,
        metavar="N",
        help="of the campaign, for one that the unit tests have not found (default 500)",
    )
    made.add_argument("--jobs", type=int, default=1, help="attempts at a time (default 1)")
    made.add_argument(
        "--deadline", type=float, default=60.0, metavar="S", help="seconds of CPU for one test or one seed (default 60)"
    )
    made.add_argument(
        "--checkout",
        type=Path,
        default=HERE.parents[1],
        metavar="DIR",
        help="whose core, tests and campaign (default: this one's)",
    )
    made.add_argument(
        "--out",
        type=Path,
        default=Path("runs/mutants.jsonl"),
        metavar="FILE",
        help="results, a JSON line each (default runs/mutants.jsonl)",
    )
    made.add_argument("--only", default="", metavar="TEXT", help="those whose place, kind or text has it")
    made.add_argument("--only-unit", action="store_true", help="no seeds and no instants")
    made.add_argument("--list", action="store_true", help="print the mutants and end")
    made.add_argument("--report", action="store_true", help="print what is in the file and end")
    found = made.parse_args(arguments)
    found.checkout, out = found.checkout.resolve(), found.out.resolve()
    sources = {
        module_of(path.relative_to(found.checkout)): path.read_text()
        for path in sorted((found.checkout / CORE).rglob("*.py"))
    }
    drawn = sample((mutant for module, source in sources.items() for mutant in mutants(source, module)), found.seed)
    chosen = [
        mutant for mutant in drawn if found.only in f"{where(mutant)} {mutant.kind} {mutant.before} {mutant.after}"
    ][: found.mutants]
    if found.list:
        for mutant in chosen:
            print(f"{where(mutant)} [{mutant.kind}]\n  - {mutant.before}\n  + {mutant.after}")
        return 0
    if found.report:
        lines = [json.loads(line) for line in out.read_text().splitlines()]
        show(chosen, {line["name"]: line for line in lines[1:]})
        return 0
    with tempfile.TemporaryDirectory(prefix="mutate") as scratch:
        enter(found.checkout, Path(scratch).resolve())
        results = hunt(found, chosen, sources, out)
        os.chdir(found.checkout)
    show(chosen, results)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
