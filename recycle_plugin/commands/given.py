"""Arguments that subcommands share, as types of planner and simulator. Functions raise one-line ValueErrors."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from recycle_plugin.core.vocabulary import costs_file
from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.plan import ONE_F_ONE_B, Plan, Policy
from recycle_plugin.core.vocabulary.stage_bytes import StageBytes
from recycle_plugin.core.vocabulary.topology import ClusterView, Topology, tied

COSTS_HELP = (
    "F, I, W (one micro-batch), comm (a boundary tensor), across (the same between replicas), reduce, tie, step, "
    "B (both backwards at once; I + W without), dispatch; in ticks, a value for each stage where stages differ: "
    "F=1/1/2/1"
)
SHAPE = (
    ("--pp", "P", "pipeline stages"),
    ("--dp", "D", "replicas of the pipeline (data parallelism)"),
    ("--micro-batches", "M", "micro-batches of each replica in a step"),
)
FINEST = 1000  # a tick's smallest part in which costs may be given
MOST = 10**9  # costs and multiples: the planner counts in 64 bits
_NAMES = {
    "F": "forward",
    "I": "input",
    "W": "weight",
    "B": "backward",
    "comm": "communication",
    "across": "communication_across",
    "reduce": "reduce",
    "tie": "tie",
    "step": "step",
    "dispatch": "dispatch",
}
_SINGLE = ("comm", "across", "tie", "dispatch")


@dataclass(frozen=True)
class JobArguments:
    """A job as the arguments describe it: shape, live seats, costs and their unit. ``scale``: integers of ``costs`` in
    one ``unit``. ``memory``: of each stage, () if it is not known.
    """

    view: ClusterView
    costs: CostModel
    policy: Policy
    unit: str
    scale: int
    origin: str
    memory: tuple[StageBytes, ...] = ()

    def shown(self, value: int) -> int | float:
        """Return a value of the cost model as a number of ``unit``."""
        return value // self.scale if value % self.scale == 0 else value / self.scale

    def plan(self) -> Plan:
        """Plan a step. Raises ValueError if there is no plan."""
        from recycle_plugin import planner

        try:
            return planner.plan(self.view, self.costs, self.policy)
        except planner.PlanError as error:
            raise ValueError(str(error)) from None


def add_job(parser: argparse.ArgumentParser, required: bool = True) -> argparse._MutuallyExclusiveGroup:
    """Add a job's arguments: shape (``required`` or not), techniques, memory, costs; return the costs' group."""
    for name, letter, text in SHAPE:
        parser.add_argument(name, type=int, required=required, metavar=letter, help=text)
    parser.add_argument(
        "--tied", default="", metavar="STAGES", help="stages that share weights, comma-separated: 0+3,1+2"
    )
    parser.add_argument(
        "--lost", default="", metavar="SEATS", help="lost workers as replica.stage, comma-separated: 1.2,0.3"
    )
    parser.add_argument(
        "--cap",
        default="1.0",
        metavar="C",
        help="what a worker may hold: micro-batches in units of P, or 1f1b for what 1F1B holds (default: 1.0)",
    )
    parser.add_argument("--no-split", action="store_true", help="both gradients at once: no decoupled backward")
    parser.add_argument(
        "--no-stagger",
        action="store_true",
        help="all stages step together, none before all have their gradients: no staggered optimizer",
    )
    parser.add_argument(
        "--no-reroute", action="store_true", help="leave a lost worker's micro-batches alone: a loss is an error"
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--costs", metavar="TICKS", help=f"costs: {COSTS_HELP} (default: F=1,I=1,W=1)")
    source.add_argument("--profile", metavar="FILE", help="costs from a traced run's costs.json")
    return source


def job(
    found: argparse.Namespace,
    milliseconds: bool = False,
    taken: tuple[CostModel, str, tuple[StageBytes, ...]] | None = None,
) -> JobArguments:
    """Return the job that :func:`add_job`'s arguments describe. ``milliseconds``: a tick of ``--costs`` is 1 ms;
    otherwise it has no length. ``taken``: costs in microseconds, their source, and memory, if the arguments name none.
    """
    refuse_empty(found)
    shape = Topology(found.dp, found.pp, found.micro_batches, ties(found.tied, found.pp))
    view = shape.full().without(*seats(found.lost, shape))
    if found.profile is not None:
        costs, memory = of_run(found.profile, found.pp)
        taken = costs, f"of each stage, as {found.profile} has them", memory
    if taken is None:
        model, scale = ticks(found.costs or "F=1,I=1,W=1", found.pp, FINEST if milliseconds else 1)
        return JobArguments(
            view, model, techniques(found), "ms" if milliseconds else "ticks", scale, found.costs or "F=I=W=1"
        )
    return JobArguments(view, taken[0], techniques(found), "us", 1, *taken[1:])


def refuse_empty(found: argparse.Namespace) -> None:
    """Raise ValueError if there are no stages, replicas or micro-batches."""
    for name in ("pp", "dp", "micro_batches"):
        value = getattr(found, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value}: write a whole number of at least 1")


def of_run(path: str, stages: int) -> costs_file.StageCosts:
    """Return the contents of ``--profile``. Raises ValueError for no file of costs, or of another number of stages."""
    try:
        found = costs_file.read(path)
    except (OSError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) else str(error).removeprefix(f"{path} has ")
        raise ValueError(f"--profile {path}: {said}; give the path of a traced run's costs.json") from None
    if found.costs.stages != stages:
        raise ValueError(f"--profile {path}: costs of {found.costs.stages} stages, and --pp is {stages}")
    return found


def ties(text: str, stages: int) -> tuple[tuple[int, ...], ...]:
    """Return the groups of stages that share weights, from the text of ``--tied`` for a pipeline of ``stages``."""
    groups = [[stage.strip() for stage in group.split("+")] for group in text.split(",") if group.strip()]
    if not all(len(group) == len(set(group)) > 1 and all(map(str.isdecimal, group)) for group in groups):
        raise ValueError(f"--tied {text}: write the numbers of stages that share weights, for instance 0+3 or 0+3,1+2")
    if missing := [stage for group in groups for stage in group if int(stage) >= stages]:
        raise ValueError(f"--tied {text}: there is no stage {missing[0]}; --pp {stages} has 0 to {stages - 1}")
    return tied([map(int, group) for group in groups])


def techniques(found: argparse.Namespace) -> Policy:
    """Return the planner's policy by :func:`add_job`'s arguments."""
    held = cap(found.cap, found.pp)
    return Policy(not found.no_split, not found.no_stagger, not found.no_reroute, held)


def seats(text: str, shape: Topology) -> tuple[Seat, ...]:
    """Return the seats that a text such as ``1.2,0.3`` names in a job of ``shape``."""
    try:
        found = tuple(Seat.parse(part.strip()) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise ValueError(f"--lost {text}: {error}") from None
    for seat in found:
        if seat not in shape.seats:
            raise ValueError(
                f"--lost {seat}: replicas are 0 to {shape.replicas - 1}, stages 0 to {shape.stages - 1}, written "
                "replica.stage"
            )
    if len(set(found)) < len(found):
        raise ValueError(f"--lost {text}: a seat is named twice")
    return found


def cap(text: str, stages: int) -> int | str:
    """Return the activation cap of ``--cap``. A number is a multiple of ``stages`` in micro-batches, rounded down."""
    if text == ONE_F_ONE_B:
        return text
    number = _decimal(text, "--cap", 'a multiple of --pp such as 1.5, or "1f1b"')
    held = int(number * stages)
    if held < 1:
        raise ValueError(f"--cap {text} of {stages} stages is less than one micro-batch: write at least {1 / stages:g}")
    return held


def ticks(text: str, stages: int, scale: int = 1) -> tuple[CostModel, int]:
    """Return the cost model of ``F=1,I=1,...``, and how many integers (at least ``scale``) are a tick."""
    values = dict(_entry(part, stages) for part in text.split(",") if part.strip())
    missing = [name for name in ("F", "I", "W") if name not in values]
    if missing:
        raise ValueError(f"--costs {text}: {', '.join(missing)} missing; write for instance F=1,I=1,W=1,comm=0,step=3")
    while any(value * scale != int(value * scale) for row in values.values() for value in row):
        scale *= 10
        if scale > FINEST:
            raise ValueError(f"--costs {text}: at most three decimals")
    rows: dict[str, Any] = {_NAMES[name]: tuple(int(value * scale) for value in row) for name, row in values.items()}
    for name in map(_NAMES.get, _SINGLE):
        if name in rows:
            rows[name] = rows[name][0]
    return CostModel(**rows), scale


def _entry(part: str, stages: int) -> tuple[str, tuple[Decimal, ...]]:
    name, equals, text = (piece.strip() for piece in part.partition("="))
    if name not in _NAMES or not equals:
        raise ValueError(f"--costs {part.strip()!r}: write name=ticks with the names {', '.join(_NAMES)}")
    row = tuple(_decimal(piece, f"--costs {name}", "a number of ticks, none negative") for piece in text.split("/"))
    wanted = 1 if name in _SINGLE else stages
    if len(row) not in (1, wanted):
        raise ValueError(f"--costs {name}={text}: {len(row)} values for {wanted} {'stages' if wanted > 1 else 'value'}")
    return name, row if len(row) == wanted else row * wanted


def _decimal(text: str, name: str, write: str) -> Decimal:
    try:
        number = Decimal(text)
    except InvalidOperation:
        number = Decimal("nan")
    if not number.is_finite() or not 0 <= number <= MOST:
        raise ValueError(f"{name} {text}: write {write}, at most {MOST}")
    return number
