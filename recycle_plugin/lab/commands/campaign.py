"""``recycle campaign``: seeded failures of a simulated cluster that runs the production code, to break it."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from typing import Any

DRAWN_TICKS = 120
EVERY = {
    "--every-instant": "4 stages x 3 replicas, 6 micro-batches: kill each worker before and after each instruction",
    "--every-return": "2 stages x 3 replicas, 4 micro-batches: the same in all steps in which another worker comes "
    "back",
    "--every-replay": "3 stages without replicas, 4 micro-batches: the same where a stage is lost and replayed from "
    "logs",
    "--every-source": "2 stages x 2 replicas, 2 micro-batches: kill a newcomer's only source at each point of serving "
    "it",
    "--every-shrink": "2 stages x 3 replicas, 4 micro-batches: the same where a replica is lost whole, and the batch "
    "shrinks",
    "--every-push": "3 replicas of 2 ranks, whose scripts run their own loops: the same where a replica comes back",
}
"""{option: which job is run again and again, and where workers are killed}"""


def add(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "campaign",
        help="look for a failure that recovery does not survive, in virtual time",
        description="Runs jobs in virtual time through the production code of executor, loop, worker and its store, "
        "membership, commit and recovery plans, "
        "with kills, stops, stuck and slow workers, lost and late messages, partitions, leaves, several at once and in "
        "recovery, over lines of unequal length; "
        "weights are exact numbers. Says how often which trouble met which instruction, and how often each rule of the "
        "protocol was needed. Exits with 1 if something that must hold does not, and prints the command that runs it "
        "again.",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--seeds", type=int, metavar="N", help="the number of random jobs (default 300)")
    what.add_argument("--seed", type=int, metavar="S", help="only the random job of this seed, with its events")
    for option, about in EVERY.items():
        what.add_argument(option, dest="every", action="store_const", const=option, help=about)
    parser.add_argument(
        "--confused",
        action="store_true",
        help="in each of these random jobs one or two workers also send messages that are valid but wrong: old, "
        "another worker's, out of turn, of a generation or a step that does not exist",
    )
    parser.add_argument(
        "--takeovers",
        action="store_true",
        help="in each of these random jobs the coordinator, its host or a standby dies, is stopped or cut off, at any "
        "time or at a step of a takeover",
    )
    parser.add_argument("--kill", metavar="FAULT", help="only the job with this fault of those kinds, with its events")
    parser.add_argument("--first", type=int, default=0, metavar="S", help="the first seed (default 0)")
    parser.add_argument("--stride", type=int, default=1, metavar="N", help="every N-th of these instants (default 1)")
    parser.add_argument(
        "--jobs",
        type=int,
        default=os.cpu_count() or 1,
        metavar="N",
        help="the number of processes (default: one for each core)",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="the result as JSON: seeds, faults, violations, redone_share, seconds, hits, exercised",
    )
    parser.set_defaults(run=run)


def run(found: argparse.Namespace) -> int:
    """Run the campaign or one of its jobs, print the result, and return the exit code. Raises ValueError."""
    from recycle_plugin import planner
    from recycle_plugin.lab.simulator import campaign

    if found.kill is not None and (found.seed, found.seeds) != (None, None):
        raise ValueError(f"--kill is one of {', '.join(EVERY)}: leave out --seed and --seeds")
    for option, given in (("--confused", found.confused), ("--takeovers", found.takeovers)):
        if given and (found.kill is not None or found.every):
            raise ValueError(f"{option} is for random jobs, those of --seeds and --seed: leave out the other")
    if found.confused and found.takeovers:
        raise ValueError("--confused and --takeovers are different jobs: leave out one of them")
    seeds = 300 if found.seeds is None else found.seeds
    if (
        seeds < 1
        or found.stride < 1
        or found.jobs < 1
        or found.first < 0
        or (found.seed is not None and found.seed < 0)
    ):
        raise ValueError("--seeds, --stride and --jobs: at least 1; --first and --seed: not negative")
    planner.warm()
    run_one = campaign.run_confused if found.confused else campaign.run_seed
    run_one = campaign.run_takeover if found.takeovers else run_one
    if found.seed is not None:
        return _story(run_one(found.seed))
    instants = campaign.EVERY[found.every or campaign.LOSS.option]
    if found.kill is not None:
        return _story(instants.run(found.kill))
    if found.every:
        report = campaign.every_instant(instants, found.stride, found.jobs)
    else:
        report = campaign.campaign(range(found.first, found.first + seeds), found.jobs, run_one)
    if found.json:
        wrong = [
            {"replay": f"recycle campaign {one.name}", "faults": one.faults, "what": one.violations}
            for one in report.violations
        ]
        hits = {
            kind: {op.value: count for (of, op), count in report.hits.items() if of == kind}
            for kind in sorted({kind for kind, _ in report.hits})
        }
        figures = {name: getattr(report, name) for name in ("seeds", "faults", "redone_share", "seconds")}
        exercised = {rule.value: count for rule, count in report.exercised.items()}
        print(json.dumps(figures | {"violations": wrong, "hits": hits, "exercised": exercised}, indent=1))
    else:
        print(
            f"{report.seeds} jobs, {report.faults} faults, {len(report.violations)} with violations; "
            f"{100 * report.redone_share:.1f}% of the compute of a job was run again; {report.seconds:.1f} s"
        )
        for one in report.violations:
            print(f"recycle campaign {one.name}  # {'; '.join(one.faults)}: {one.violations[0]}")
        print(_table(report.hits))
        print("\n".join(f"{count:10} times {rule.value}" for rule, count in report.exercised.items()))
        if report.violations:
            print(_drawn(report.violations[0]))
    return 1 if report.violations else 0


def _story(outcome) -> int:
    print("\n".join(("faults: " + "; ".join(outcome.faults), *outcome.story)))
    print(_drawn(outcome))
    print("\n".join(f"VIOLATION: {text}" for text in outcome.violations) or "nothing was wrong")
    return 1 if outcome.violations else 0


def _table(hits: Mapping[tuple[str, Any], int]) -> str:
    """Return a table: how often each kind of trouble struck a worker at each instruction."""
    from recycle_plugin.core.vocabulary.instruction import Op

    ops = [op for op in Op if any(of is op for _, of in hits)]
    lines = [f"{'struck at':>10} " + " ".join(f"{op.value:>6}" for op in ops)]
    lines += [
        f"{kind:>10} " + " ".join(f"{hits.get((kind, op), 0):6}" for op in ops)
        for kind in sorted({kind for kind, _ in hits})
    ]
    return "\n".join(lines)


def _drawn(outcome) -> str:
    from recycle_plugin.core.vocabulary.instruction import COMPUTE
    from recycle_plugin.render import grid

    spans = [span for span in outcome.spans if span.instruction.op in COMPUTE]
    if not spans:
        return "nothing was computed"
    return grid.draw(spans, max(1, max(span.end_us for span in spans) // DRAWN_TICKS))
