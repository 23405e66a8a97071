"""What is written once stays so: who holds, voids, drops and lowers."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Iterator

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
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Instruction"):
            named = {node.attr for node in ast.walk(call) if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "Op"}
            makers |= {name} & ({name} if named & (TRANSPORT | {"LOAD"}) else set())
    assert makers == {"planner/lower.py"}


def test_what_an_instruction_uses_up_is_asked_for_in_one_module() -> None:
    users = {name for name, tree in modules() for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "consumes"}
    assert users == {"core/stepstore.py"}


def test_data_of_a_step_is_held_voided_and_dropped_in_one_class() -> None:
    """No other class has methods of these names for data of a step; the coordinator's have words of workers, by step."""
    verbs = {"held", "void", "drop", "promise", "forget_evaluation"}
    found = {
        f"{name}: {each.name}.{method.name}"
        for name, tree in modules("core", "runtime", "adapters", "simulator") for each in ast.walk(tree) if isinstance(each, ast.ClassDef)
        for method in each.body if isinstance(method, ast.FunctionDef) and method.name in verbs
    }  # fmt: skip
    store = {f"core/stepstore.py: StepStore.{verb}" for verb in ("held", "void", "forget_evaluation")}
    handed_on = {f"core/worker.py: Worker.{verb}" for verb in ("held", "void", "forget_evaluation")} | {f"core/loop.py: Replica.{verb}" for verb in ("held", "void")}
    coordinators = {"core/contributions.py: Contributions.void", "core/verdict.py: Verdicts.void"}
    assert found == store | handed_on | coordinators


def test_the_campaign_runs_what_trains() -> None:
    """The production modules that run in it: everything between a message and an instruction's numbers."""
    ran = set()

    def note(frame, event, argument) -> None:
        ran.add(frame.f_globals.get("__name__", ""))

    sys.setprofile(note)
    try:
        for seed in range(40):
            campaign.run_seed(seed)
    finally:
        sys.setprofile(None)
    core = {name.removeprefix("recycle_plugin.core.") for name in ran if name.startswith("recycle_plugin.core.")}
    assert core >= {
        "attendance", "blocks", "complaints", "contributions", "course", "dataflow", "ending", "enrolment", "escalation", "executor", "faults", "line",
        "lineage", "loop", "membership", "output", "pace", "plan", "program", "protocol", "regrouping", "roster", "step", "steps", "stepstore", "verdict",
        "watch", "work", "worker",
    }  # fmt: skip
    planner = {name.removeprefix("recycle_plugin.planner.") for name in ran if name.startswith("recycle_plugin.planner.")}
    assert planner >= {"lower", "rest", "make"}
    assert not any(name.startswith(("recycle_plugin.runtime", "recycle_plugin.adapters")) for name in ran), "which need torch, and do what core tells them"
