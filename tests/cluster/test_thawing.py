"""Parameters that scripts freeze and thaw between steps, and groups that they add (see tests/jobs/thawing.py)."""

from __future__ import annotations

import json

import pytest
import torch

from tests.support.cluster import Result
from tests.support.jobs import LOSS_TOLERANCE, assert_one_line
from tests.support.returns import LONG

STEPS = 12


@pytest.fixture
def start(launch, tmp_path):
    """``start(*faults, **job)``: the job that has begun, number by number."""
    runs: list[object] = []

    def run(*faults: str, **more: object):
        folder = tmp_path / f"run{len(runs)}"
        job = {"folder": str(folder), "faults": faults, "steps": STEPS} | more
        runs.append(launch(script="tests/jobs/thawing.py", RECYCLE_TEST_THAWING=json.dumps(job)))
        return runs[-1]

    return run


def ends(result: Result) -> list[dict]:
    assert result.code == 0, result.output[-6000:]
    return [json.loads(path.read_text()) for path in sorted((result.folder / "ends").iterdir())]


def assert_alike(result: Result, expected: Result, left: int = 4) -> None:
    stages = {frozenset(end["weights"]): end for end in ends(expected)}
    found = ends(result)
    assert len(found) == left and len(stages) == 2
    for end in found:
        other = stages[frozenset(end["weights"])]
        assert end["losses"] == pytest.approx(other["losses"], abs=LOSS_TOLERANCE)
        for name, values in end["weights"].items():
            assert torch.allclose(torch.tensor(values), torch.tensor(other["weights"][name]), rtol=0, atol=1e-5), name


@pytest.fixture
def stock(start) -> Result:
    return start(recycle={"enabled": False}).finish()


@pytest.mark.parametrize("plain", (False, True), ids=("DeepSpeed", "plain"))
def test_as_stock(start, stock, plain):
    assert_alike(start(plain=plain).ended_well(), stock)
    (first, *_) = (end for end in ends(stock) if "0.weight" in end["weights"])
    assert first["losses"][0] > first["losses"][-1]


KILLS = (
    ("kill 0.0 before 0F0.1@4", False),
    ("kill 0.1 before 1W0.1@4", True),
    ("kill 1.1 after 1STEP@4", False),
    ("kill 1.0 after 0STEP@3", False),
    ("kill 0.1 after 1STEP@3", True),
    ("kill 0.0 before 0REDUCE@7", False),
)


@pytest.mark.some_of(3)
@pytest.mark.parametrize("kill, plain", KILLS)
def test_whoever_dies_around_the_change(start, stock, kill, plain):
    """In the step before it, which may not be committed when the script changes what is trained, in the step behind it,
    and where parameters are frozen again.
    """
    result = start(kill, plain=plain, recycle={"rejoin": "never"}).ended_well()
    assert len(result.of("lost")) == 1 and not result.of("error")
    assert_alike(result, stock, 3)


@pytest.mark.parametrize("undo", ("snapshot", "inverse"))
@pytest.mark.parametrize("kill", ("kill 0.0 before 0F0.1@5", "kill 1.1 after 1STEP@7"))
def test_who_comes_back_behind_the_changes_has_them(start, kill, undo):
    """Its script goes through them while it is behind; the others wait for it before step 9."""
    stock = start(steps=LONG, recycle={"enabled": False}).finish()
    more = {"undo": undo, "check_replicas": int(undo == "snapshot")}
    started = start(kill, steps=LONG, held=[9], recycle=more)
    started.wait_for(lambda: started.of("newcomer"), "a newcomer")
    (started.folder / "go9").touch()
    result = started.ended_well()
    assert result.of("rejoined") and not result.of("turned_down")
    assert_alike(result, stock)


def test_a_change_while_a_worker_comes_back_costs_it_that_start_at_most(start):
    """The others go on as it begins, to the step before which parameters are frozen; its next process comes back."""
    stock = start(steps=LONG, recycle={"enabled": False}).finish()
    started = start("kill 0.0 before 0F0.1@5", steps=LONG, held=[6, 12])
    started.wait_for(lambda: started.of("newcomer"), "a newcomer")
    (started.folder / "go6").touch()
    started.wait_for(lambda: started.of("rejoined") or len(started.of("newcomer")) == 2, "its next process")
    (started.folder / "go12").touch()
    result = started.ended_well()
    assert result.of("rejoined")
    assert_alike(result, stock)


def test_a_job_with_a_log_is_refused_in_one_line(start):
    said = ".linear.weight has changed since training was set up, which is not supported in a job with recycle.log"
    assert_one_line(start(recycle={"log": {}, "checkpoint": {}}).finish(), said)


def test_a_thawed_parameter_without_a_group_is_refused_in_one_line(start):
    said = "0.linear.weight requires a gradient, and the optimizer does not have it: call optimizer.add_param_group()"
    assert_one_line(start(forgets=True).finish(), said)


def test_replicas_that_freeze_other_parameters_are_refused_in_one_line(start):
    """Which are as large, so that their sums can be made: of gradients of different parameters."""
    said = "replicas have frozen or thawed other parameters before step 7: have all of them change the same"
    assert_one_line(start(apart=True, recycle={"check_replicas": 0}).finish(), said)


@pytest.mark.parametrize("inside, plain", ((True, False), (False, True)), ids=("thaws", "freezes"))
def test_a_forward_that_changes_what_is_trained_is_refused_in_one_line(start, inside, plain):
    """A forward that freezes its weight has run in the same step, and what is left of its backward is behind that."""
    said = f".linear.weight was {'thawed' if inside else 'frozen'} inside of step 2, as by a layer's forward"
    assert_one_line(start(inside=inside, plain=plain, call=5).finish(), said)
