"""What is written once stays so: who holds, voids, drops, lowers, searches the members, and names a device."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from recycle_plugin.simulator import campaign

PACKAGE = Path(campaign.__file__).parents[1]
TRANSPORT = {"SEND_ACT", "SEND_GRAD", "RECV_ACT", "RECV_GRAD"}


def modules(*folders: str) -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if not folders or name.split("/")[0] in folders:
            yield name, ast.parse(path.read_text())


def test_transport_is_put_around_computation_in_one_module() -> None:
    """... which alone makes instructions of these kinds; whoever else names them, reads."""
    makers = set()
    for name, tree in modules():
        for call in (
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Instruction"
        ):
            named = {
                node.attr
                for node in ast.walk(call)
                if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "Op"
            }
            makers |= {name} & ({name} if named & (TRANSPORT | {"LOAD"}) else set())
    assert makers == {"planner/lower.py"}


def test_what_an_instruction_uses_up_is_asked_for_in_one_module() -> None:
    users = {
        name
        for name, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "consumes"
    }
    assert users == {"core/worker/step_store.py"}


def test_data_of_a_step_is_held_voided_and_dropped_in_one_class() -> None:
    """No other class has methods of these names for data of a step; the coordinator's have words of workers, by
    step.
    """
    verbs = {"held", "discard_after", "drop", "promise", "forget_evaluation"}
    found = {
        f"{name}: {each.name}.{method.name}"
        for name, tree in modules("core", "runtime", "adapters", "simulator")
        for each in ast.walk(tree)
        if isinstance(each, ast.ClassDef)
        for method in each.body
        if isinstance(method, ast.FunctionDef) and method.name in verbs
    }
    store = {f"core/worker/step_store.py: StepStore.{verb}" for verb in ("held", "discard_after", "forget_evaluation")}
    handed_on = {f"core/worker/worker.py: Worker.{verb}" for verb in ("held", "discard_after", "forget_evaluation")} | {
        f"core/worker/training_loop.py: StepRunner.{verb}" for verb in ("held", "discard_after")
    }
    coordinators = {
        "core/messages/contributions.py: Contributions.discard_after",
        "core/coordinator/step_validation.py: StepValidation.discard_after",
    }
    assert found == store | handed_on | coordinators


# --- members -----------------------------------------------------------------------------------------------

FACTS = {"rank", "seat", "address", "worker", "shard"}  # that a member is known by
SEVERAL = {
    "stage",
    "stages",
    "group",
    "replica",
    "without",
    "joins",
    "leaves",
}  # a roster's answers that are several members
LOOPS = (ast.For, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda)


def searches(source: str) -> Iterator[str]:
    """Where each of several things is compared with what a member is known by, or put into a dict by that, and where
    the first of members is taken.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, LOOPS):
            each = names_of(node)
            for one in ast.walk(node):
                if isinstance(one, ast.Compare) and any(asks(one, side, each) for side in (one.left, *one.comparators)):
                    yield ast.unparse(one)
            if isinstance(node, ast.DictComp) and fact(node.key, each):
                yield ast.unparse(node)
        elif (
            isinstance(node, ast.Subscript)
            and are_members(node.value)
            and isinstance(node.slice, (ast.Constant, ast.UnaryOp))
        ):
            yield ast.unparse(node)
        elif (
            isinstance(node, ast.Call)
            and getattr(node.func, "id", "") in {"next", "min", "max", "iter", "sorted"}
            and node.args
        ):
            over = (
                node.args[0].generators[0].iter
                if isinstance(node.args[0], ast.GeneratorExp) and node.func.id != "sorted"
                else node.args[0]
            )
            if are_members(over):
                yield ast.unparse(node)


def names_of(loop: ast.AST) -> set[str]:
    """What stands for each of the things that ``loop`` goes through."""
    if isinstance(loop, ast.Lambda):
        return {argument.arg for argument in loop.args.args}
    targets = [loop.target] if isinstance(loop, ast.For) else [part.target for part in loop.generators]
    return {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}


def fact(node: ast.AST, each: set[str]) -> str:
    """``seat`` of ``one.seat.stage``, where ``one`` is among the names."""
    last = ""
    while isinstance(node, ast.Attribute):
        node, last = node.value, node.attr
    return last if last in FACTS and getattr(node, "id", "") in each else ""


def asks(compare: ast.Compare, side: ast.AST, each: set[str]) -> bool:
    """By equality; also by what it is in, but for what is told by workers of themselves."""
    equal = any(isinstance(op, (ast.Eq, ast.NotEq, ast.Is, ast.IsNot)) for op in compare.ops)
    return bool(known := fact(side, each)) and (equal or known != "worker")


def are_members(node: ast.AST) -> bool:
    """By the name of what they are in, or as a roster's answer."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute) and node.func.attr in SEVERAL and are_members(node.func.value)
    return getattr(node, "id", "") == "roster" or getattr(node, "attr", "") in {"roster", "members"}


PLANTED = (
    "next(member for member in generation.members if member.rank == rank)",
    "[one for one in roster if one.seat == seat]",
    "{m.worker for m in members if m.seat.stage == stage}",
    "any(each.address != address for each in generation.roster)",
    "for member in roster:\n    if member.shard == shard:\n        found = member",
    "next(filter(lambda member: member.rank == rank, roster))",
    "min(roster, key=lambda member: member.rank)",
    "generation.members[0]",
    "next(iter(self.roster))",
    "roster.stage(stage)[0]",
    "roster.without(gone).members[-1]",
    "{member.rank: member for member in roster}",
    "{member.seat: member.rank for member in roster.stage(0)}",
    "min(member.rank for member in roster)",
    "[member for member in roster if member.seat in seats]",
    "sorted(generation.roster, key=lambda member: member.rank)",
)
NONE = (
    "roster.member(worker)",
    "roster.holder(seat).rank",
    "[member.rank for member in roster]",
    "{member.host for member in roster}",
    "message.seat == self.seat",
    "{seat: roster.holder(seat).rank for seat in roster.seats}",
    "[said[member.worker] for member in roster if member.worker in said]",
    "sorted(member.seat.replica for member in roster.stage(stage))",
    "[seat for seat in seats if seat.stage == stage]",
    "spans[0]",
)


@pytest.mark.parametrize("source", PLANTED)
def test_a_search_of_members_is_found(source) -> None:
    assert list(searches(source))


@pytest.mark.parametrize("source", NONE)
def test_what_is_asked_of_a_roster_is_no_search(source) -> None:
    assert not list(searches(source))


def test_members_are_searched_in_one_module() -> None:
    """Who has a rank, seat, stage or address, and who comes first, a roster says; what else is found are no members."""
    found = {
        (path.relative_to(PACKAGE).as_posix(), each)
        for path in sorted(PACKAGE.rglob("*.py"))
        for each in searches(path.read_text())
    }
    faults = {
        ("runtime/worker/job_record.py", "fault.seat not in topology.seats"),
        ("simulator/ledger.py", "other.seat == worker.seat"),  # among all simulated workers, which are no roster
        ("commands/failure.py", "fault.seat not in struck"),
        ("core/vocabulary/faults.py", "fault.seat == seat"),
        ("simulator/seeded.py", "each.seat in seats"),
    }
    logs = {  # of whoever has written them, members or not
        ("core/coordinator/log_places.py", "worker.rank in ranks"),
        ("core/coordinator/logs.py", "each.worker != member.worker"),
        ("core/coordinator/logs.py", "each.worker != by.worker"),
        ("simulator/cluster.py", "log.worker.rank == rank"),
    }
    spans = {("render/perfetto.py", "source.seat == span.seat")}
    failures = {("observability/report.py", "{failure.seat: _us(failure.struck_at) for failure in lost}")}
    assert {each for each in found if each[0] != "core/vocabulary/roster.py"} == (faults | logs | spans | failures)
    assert any(name == "core/vocabulary/roster.py" for name, _ in found)


# --- devices -----------------------------------------------------------------------------------------------

KINDS = {"cpu", "cuda"}
ASKS = {"get_accelerator", "is_cpu", "is_cuda"}
DEVICES = "runtime/devices/host.py"
NAMED = {  # elsewhere, and why
    "adapters/deepspeed/engine_checks.py": {
        "get_accelerator"
    },  # asks what DeepSpeed has found, for that module to judge
    "experiments/runs.py": {"cpu"},  # sets it for the jobs that it starts
    "checks/installed.py": {"cuda", "torch.cuda", "torch.version.cuda"},  # which releases and drivers there are
    "checks/watched.py": {"torch.cuda", "torch.cuda._sanitizer"},  # torch has such a tool for one kind only
    "commands/profile.py": {"cpu", "cuda"},  # the choices of a measurement, also of devices that nothing trains on yet
    "runtime/devices/accelerator.py": {"torch.version.cuda"},  # for its text of what decides how operations round
    "commands/measure_gpt.py": {"cpu", "cuda", "torch.cuda"},  # the measurement
}


def device_names(source: str) -> Iterator[str]:
    """Where code names a kind of device, asks for one, or moves a tensor to one by its name."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Constant(value=str(text)) if re.fullmatch(r"(cpu|cuda)(:\S*)?", text):
                yield text
            case ast.Attribute(attr=name) if name in KINDS | ASKS:
                yield ast.unparse(node)
            case ast.Name(id=name) if name in ASKS:
                yield name
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                of = getattr(node, "module", None) or ""
                yield from (
                    f"{of}.{one.name}".lstrip(".") for one in names if KINDS & {*of.split("."), *one.name.split(".")}
                )


NAMING = (
    'torch.zeros(1, device="cpu")',
    'torch.device("cuda:0")',
    'backend == "cpu:gloo"',
    "tensor.cpu()",
    "tensor.detach().cuda()",
    "torch.cuda.synchronize()",
    "torch.backends.cpu.get_cpu_capability()",
    "get_accelerator().name()",
    "accelerator.get_accelerator()",
    "tensor.is_cuda",
    "move = torch.Tensor.cpu",
    "from torch import cuda",
    "from torch.cuda import amp",
    "import torch.cuda",
)
NOT_NAMING = (
    '"""Of the cpu."""',
    'raise ValueError("cpu: no")',
    "tensor.to(device)",
    "cpu = 1",
    "run(cuda_graph_scope=[])",
    "tracker.get_cuda_rng_tracker()",
    "device.kind",
)


@pytest.mark.parametrize("source", NAMING)
def test_a_kind_of_device_is_found(source) -> None:
    assert list(device_names(source))


@pytest.mark.parametrize("source", NOT_NAMING)
def test_what_names_no_kind_of_device_is_none(source) -> None:
    assert not list(device_names(source))


def test_a_kind_of_device_is_named_in_one_module() -> None:
    found = {
        path.relative_to(PACKAGE).as_posix(): names
        for path in sorted(PACKAGE.rglob("*.py"))
        if (names := set(device_names(path.read_text())))
    }
    assert "cpu" in found.pop(DEVICES) and found == NAMED


RUN_OF_CORE = {
    "attendance",
    "barriers",
    "blocks",
    "catching_up",
    "checkpoint_saving",
    "commit_rule",
    "complaints",
    "contributing",
    "contributions",
    "control_view",
    "course",
    "dataflow",
    "departures",
    "ending",
    "ends",
    "enrolment",
    "evaluation",
    "executor",
    "failure_detector",
    "faults",
    "filled_stage",
    "iterator_data",
    "iterator_draws",
    "joining",
    "membership",
    "newcomer",
    "output",
    "plan",
    "program",
    "of_worker",
    "from_coordinator",
    "from_workers",
    "logs",
    "replay",
    "replays",
    "goodbyes",
    "step_batches",
    "step_log",
    "recorded",
    "recovery_plan",
    "regrouping",
    "restarts",
    "resuming",
    "roster",
    "serving",
    "stalls",
    "step_figures",
    "step_ledger",
    "step_store",
    "step_validation",
    "stopwatch",
    "straggler_detector",
    "throughput_floor",
    "training_loop",
    "worker",
}
RUN_OF_PLANNER = {"forwards", "lower", "recovery_order", "make"}


def test_the_campaign_runs_what_trains() -> None:
    """The production modules that run in it: everything between a message and an instruction's numbers."""
    ran = set()

    def note(frame, event, argument) -> None:
        ran.add(frame.f_globals.get("__name__", ""))

    sys.setprofile(note)
    try:
        for seed in range(24):
            campaign.run_seed(seed)
    finally:
        sys.setprofile(None)
    core = {name.rpartition(".")[2] for name in ran if name.startswith("recycle_plugin.core.")}
    assert core >= RUN_OF_CORE
    planner = {
        name.removeprefix("recycle_plugin.planner.") for name in ran if name.startswith("recycle_plugin.planner.")
    }
    assert planner >= RUN_OF_PLANNER
    assert not any(name.startswith(("recycle_plugin.runtime", "recycle_plugin.adapters")) for name in ran), (
        "which need torch, and do what core tells them"
    )
