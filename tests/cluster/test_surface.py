"""The public methods and properties of DeepSpeed's engine, and of its optimizer, beside stock's: its value, or refused
by name, fault-free and after a loss; generated from the classes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import Result

SCRIPT = "tests/jobs/surface.py"
STEPS = 3
BASE = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.01,
    "steps_per_print": 1,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
}
BF16 = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1},
        "data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"}  # fmt: skip


KINDS = {
    "bf16": (BF16, {"zero": "replicate"}),
    "fp32": ({}, {}),
    "replica": ({"zero_optimization": {"stage": 1}}, {"unit": "replica", "replicas": 2}),
}  # DeepSpeed's settings, and the plugin's
OF_SHARDS = {
    "optimizer.backward",
    "optimizer.is_gradient_accumulation_boundary",
    "optimizer.set_gradient_accumulation_boundary",
}
REFUSED = {
    "bf16": {"set_train_micro_batch_size", "optimizer.load_state_dict"} | OF_SHARDS,
    "fp32": {"set_train_micro_batch_size"},
    "replica": {
        "backward",  # without a forward
        "coalesce_grad_reduction",
        "no_sync",
        "set_gradient_accumulation_boundary",
        "set_train_batch_size",
        "set_train_micro_batch_size",
    },
}
OTHER = {
    "bf16": {
        "zero_optimization",  # stock code is told that there are no shards
        "zero_optimization_stage",
        "optimizer.param_groups",  # whole masters, one for each parameter, where stock's are flat parts
        "optimizer.state",
        "optimizer.defaults",  # stock's has none
    },
    "fp32": set(),
    "replica": set(),
}
LINE = re.compile(r"^steps: (\d+) loss: (\S+) iter time \(s\): \S+ samples/sec: \S+$", re.MULTILINE)
NUMBER = re.compile(r"-?\d+\.?\d*(?:e-\d+)?")


def ran(launch, folder, kind: str, recycle: dict[str, Any], **more: Any) -> Result:
    """A job whose engine is asked for all that it has; ``recycle`` is the plugin's section."""
    section = {"run_dir": str(folder), "report": False, **recycle}
    config = {**BASE, **KINDS[kind][0], **more, "recycle": section}
    job = {"folder": str(folder), "config": config, "steps": STEPS, "replica": kind == "replica"}
    result = launch(script=SCRIPT, RECYCLE_TEST_SURFACE=json.dumps(job)).finish()
    assert result.code == 0 and result.records, result.output[-6000:]
    return result


def alike(one: str, other: str) -> bool:
    """Whether two texts differ in the last digits of numbers at most."""
    numbers, others = ([float(each) for each in NUMBER.findall(text)] for text in (one, other))
    return NUMBER.sub("", one) == NUMBER.sub("", other) and numbers == pytest.approx(others, rel=1e-3, abs=3e-5)


def compare(result: Result, stock: Result, kind: str, besides: frozenset[str] = frozenset()) -> None:
    """Each name has stock's value, or is refused, or is known to be another one; ``besides``: and these."""
    for rank, record in result.records.items():
        assert not record["unknown"], (
            f"DeepSpeed has {record['unknown']}: say in tests/jobs/surface.py how each is called, or why it is left out"
        )
        mine, theirs = record["surface"], stock.records[rank]["surface"]
        assert mine.keys() == theirs.keys() and len(mine) > 130
        differ = {name for name in theirs if not alike(mine[name], theirs[name])} - besides
        refused = {name for name in differ if mine[name].startswith(("RecycleError: ", "NotInOptimizer: "))}
        assert refused == REFUSED[kind], {name: (mine[name], theirs[name]) for name in refused ^ REFUSED[kind]}
        assert differ - refused == OTHER[kind], {
            name: (mine[name][:300], theirs[name][:300]) for name in (differ - refused) ^ OTHER[kind]
        }


@pytest.mark.parametrize("kind", ("bf16", "replica", pytest.param("fp32", marks=pytest.mark.all_kills)))
def test_each_name_of_the_engine_has_stocks_value_or_is_refused(launch, tmp_path, kind):
    """Three steps of 2 x 2 workers; and the same when one is lost before the second step."""
    stock = ran(launch, tmp_path / "run0", kind, {"enabled": False})
    section = {"enabled": True, **KINDS[kind][1]}
    whole = ran(launch, tmp_path / "run1", kind, section)
    compare(whole, stock, kind)
    if kind != "replica":
        told = LINE.findall(stock.output)
        assert [step for step, _ in told] == ["1", "2", "3"] and LINE.findall(whole.output) == told
    fault = {"rejoin": "never", "faults": ["kill 1.0 before 0F1.0@2"]}
    lost = ran(launch, tmp_path / "run2", kind, section | fault)
    assert lost.of("lost") and len(lost.records) < 4
    of_other_samples = frozenset({"get_global_grad_norm"} if kind == "replica" else ())
    compare(lost, stock, kind, of_other_samples)


def test_a_norm_that_nobody_knows_is_refused(launch, tmp_path):
    """Where steps don't wait for it."""
    section = {"enabled": True, "zero": "replicate", "clip": "validate"}
    for record in ran(launch, tmp_path / "run0", "bf16", section, gradient_clipping=1000.0).records.values():
        said = record["surface"]["get_global_grad_norm"]
        assert said.startswith("RecycleError: engine.get_global_grad_norm(): steps are applied before their norm"), said


def test_what_is_refused_is_said():
    """In docs/supported.md."""
    text = (Path(__file__).parents[2] / "recycle_plugin" / "docs" / "supported.md").read_text()
    section = text.partition("## DeepSpeed's engine, name by name")[2].partition("\n## ")[0]
    names = set().union(*REFUSED.values(), *OTHER.values())
    assert not (left := {name for name in names if f"`{name.removeprefix('optimizer.')}`" not in section}), left
