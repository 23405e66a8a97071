"""Costs from the spans of a run, those of tests/support/run_folder.py: F 20 ms, I 10 ms, W 5 ms, REDUCE 8 ms for who
comes last, STEP 3 ms.
"""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest

from recycle_plugin.cli import main
from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.costs_file import read
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.instruction import Instruction, Op
from recycle_plugin.core.vocabulary.span import Span
from recycle_plugin.core.vocabulary.stage_bytes import StageBytes
from recycle_plugin.observability import report
from recycle_plugin.observability.measured_costs import measured_costs
from recycle_plugin.observability.trace import TraceFile
from tests.support.run_folder import spans, trace

COSTS = CostModel((20_000,) * 2, (10_000,) * 2, (5_000,) * 2, reduce=(8_000,) * 2, step=(3_000,) * 2)


def test_costs_are_those_of_undisturbed_steps():
    """Step 6 has a failure, and step 1 is slower in this trace."""
    slow = [span._replace(end_us=span.end_us + 70_000) if span.instruction.step in (1, 6) else span for span in spans()]
    assert measured_costs(slow, 2, range(2, 6)) == COSTS
    assert measured_costs(slow, 2, range(1, 2)) != COSTS


def test_a_backward_that_was_not_split_is_halved():
    whole = [
        Span(span.seat, Instruction.parse(str(span.instruction).replace("1I", "1B")), span.start_us, span.end_us + 1)
        for span in spans()
        if not str(span.instruction).startswith("1W")
    ]
    costs = measured_costs(whole, 2, range(2, 6))
    assert costs is not None and (costs.input[1], costs.weight[1], costs.backward) == (5000, 5001, ())
    assert [costs.of(op, 1) for op in (Op.F, Op.B)] == [20_001, 10_001]


@pytest.mark.parametrize("whole_us", (9_000, 10_000, 10_001, 15_000))
def test_a_stage_that_splits_nothing_since_that_takes_longer_has_nothing_to_defer(whole_us):
    """Its first steps were run both ways, I in 10 ms and W in 5."""
    both = [*spans()]
    for span in spans():
        one = span.instruction
        if one.op is Op.I and one.stage == 1:
            both.append(span._replace(instruction=replace(one, op=Op.B), end_us=span.start_us + whole_us))
    costs = measured_costs(both, 2, range(2, 6))
    assert costs is not None and (costs.input[0], costs.weight[0]) == (10_000, 5_000)
    assert (costs.input[1], costs.weight[1]) == ((whole_us, 0) if whole_us <= 10_000 else (10_000, 5_000))


@pytest.mark.parametrize("gone", ("1F", "1I"))
def test_there_are_none_without_a_stages_forward_or_backward(gone):
    left = [span for span in spans() if not str(span.instruction).startswith(gone)]
    assert measured_costs(left, 2, range(2, 6)) is None


def test_a_traced_run_leaves_them_for_the_doctor(folder, tmp_path, capsys):
    report.write(folder)
    assert not (folder / "costs.json").exists(), "there is no trace"
    trace(folder)
    report.write(folder)
    assert read(folder / "costs.json").costs == COSTS
    (config := tmp_path / "ds_config.json").write_text(
        json.dumps({"train_micro_batch_size_per_gpu": 1, "recycle": {"enabled": True}, "gradient_clipping": 0})
    )
    asked = ["doctor", str(config), "--dp", "2", "--micro-batches", "1", "--profile", str(folder / "costs.json")]
    assert main([*asked, "--pp", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["job"]["costs"] == f"of each stage, as {folder / 'costs.json'} has them"
    of_run = [*asked[:2], "--micro-batches", "1", "--json", "--run", str(folder)]
    assert main(of_run) == 0 and json.loads(capsys.readouterr().out) == found
    assert main([*of_run, "--dp", "3"]) == 0 and json.loads(capsys.readouterr().out)["job"]["replicas"] == 3
    assert main([*of_run, "--profile", "costs.json"]) == 2
    (folder / "costs.json").rename(folder / "moved.json")
    assert main(of_run) == 2 and "recycle report" in capsys.readouterr().err
    (folder / "moved.json").rename(folder / "costs.json")
    assert main([*asked, "--pp", "3"]) == 2
    assert "costs of 2 stages, and --pp is 3" in capsys.readouterr().err


@pytest.mark.parametrize("stages", ((0, 1), (1,)))
def test_what_stages_hold_is_there_if_each_has_said_it(folder, stages):
    said = {"time": 100.9, "event": "memory", "text": "", "rank": 0, "activation": 70, "pending": 30}
    held = {field.name: 5 for field in fields(StageBytes)} | {"device": "cpu"}
    with (folder / "events.jsonl").open("a") as file:
        file.writelines(f"{json.dumps(said | held | {'stage': stage, 'weights': stage})}\n" for stage in stages)
    trace(folder)
    report.write(folder)
    costs, memory = read(folder / "costs.json")
    if len(stages) < 2:
        assert (costs, memory) == (COSTS, ())
        return
    assert costs == replace(COSTS, activation_bytes=(70, 70), pending_bytes=(30, 30))
    assert memory == tuple(StageBytes(**(held | {"weights": stage})) for stage in stages)


def test_work_that_was_run_again_after_a_loss_is_in_no_cost(folder):
    """Step 6 was interrupted: the spans of that step, late and long, are more than those of all steps before."""
    trace(folder)
    late = TraceFile(folder / "trace", Seat(1, 1), print)
    for at in range(102_780_000, 102_820_000, 1000):
        for name in ("F0.0", "I0.0", "W0.0", "REDUCE", "STEP"):
            late.ran(Span(Seat(1, 1), Instruction.parse(f"1{name}@6"), at, 103_100_000))
    late.close()
    report.write(folder)
    assert read(folder / "costs.json").costs == COSTS
