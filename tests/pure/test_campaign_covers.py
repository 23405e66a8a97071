"""What the campaign checks is what trains: the modules that a job's coordinator and workers run, run in it too."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from recycle_plugin.lab.simulator import campaign

CORE = Path(campaign.__file__).parents[2] / "core"
CORE_ALONE = {  # told nothing by a failure, so that no schedule of failures reaches them; each has a test of its own
    "coordinator.operating",
    "coordinator.facts.wait_graph",
    "worker.checkpoint_interval",
    "worker.data_cursor",
    "worker.machine",  # protocols, in which nothing runs
}


@pytest.fixture(scope="module")
def ran() -> set[str]:
    """The names of the modules that run in a few jobs of the campaign."""
    names = set()

    def note(frame, event, argument) -> None:  # None: the lines of that call are not traced
        names.add(frame.f_globals.get("__name__", ""))

    before = sys.gettrace()
    sys.settrace(note)
    try:
        for seed in range(20):
            campaign.run_seed(seed)
        for seed in range(4):
            campaign.run_takeover(seed)
    finally:
        sys.settrace(before)
    return names - {"recycle_plugin.adapters.unlaunched"}  # which looks at imports, once torch is there


@pytest.mark.parametrize("part", ["coordinator", "worker"])
def test_every_module_of_the_protocol_runs(ran: set[str], part: str) -> None:
    files = (path.relative_to(CORE).with_suffix("") for path in (CORE / part).rglob("[!_]*.py"))
    there = {".".join(("recycle_plugin.core", *path.parts)) for path in files}
    assert there - ran == {f"recycle_plugin.core.{name}" for name in CORE_ALONE if name.startswith(part)}


def test_plans_are_made_as_in_a_job(ran: set[str]) -> None:
    assert ran >= {f"recycle_plugin.planner.{name}" for name in ("forwards", "lower", "recovery", "closure", "make")}


def test_nothing_that_needs_torch_is_run(ran: set[str]) -> None:
    assert not [name for name in ran if name.startswith(("recycle_plugin.runtime", "recycle_plugin.adapters"))]
