"""A run's own figures of its memory: in its events, in costs.json, and in what ``recycle doctor`` says with that.

That state and gradients are what allocators count: tests/cluster/test_memory.py.
"""

from __future__ import annotations

import json

import pytest

from recycle_plugin.cli import main
from recycle_plugin.observability import report
from recycle_plugin.observability.trace import read_traces
from recycle_plugin.runtime.stage.backward_choice import WARM_UP

TOKENS, WIDTH, FP32 = 32, 16, 4  # of tests/jobs/plain.py, whose micro-batch is one sample
ONE = TOKENS * WIDTH * FP32  # bytes of what goes from layer to layer
WIDE, IDS, MOMENTS = 4 * ONE, TOKENS * 8, 2 * TOKENS * FP32
BLOCK = ONE + MOMENTS + ONE + WIDE + WIDE  # inputs of the norm, with its moments, of both linear layers, and of gelu
LOSS = WIDE + IDS + 2 * FP32  # logarithms, labels, what the mean is over, and the loss
ACTIVATIONS = IDS + BLOCK + ONE, ONE + BLOCK + ONE + LOSS  # what comes to a stage is there twice: a layer may change it
LINEAR = ONE + WIDE  # a linear layer's input, and the gradient of its output
PENDING = 2 * LINEAR + IDS + ONE, 3 * LINEAR  # of the layers whose backward is split
PARAMETERS = 2 * WIDTH + (WIDTH + 1) * 4 * WIDTH + (4 * WIDTH + 1) * WIDTH  # of a block
WEIGHTS = FP32 * (64 * WIDTH + PARAMETERS), FP32 * (PARAMETERS + (WIDTH + 1) * 64)
COUNTS = 7, 8  # of steps, which Adam has for each tensor


@pytest.mark.plain_too(deepspeed=False)
def test_a_run_says_what_each_stage_holds_as_one_counts_by_hand(launch, tmp_path, capsys):
    result = launch("dropout=0.0", "steps=8", "recycle.trace=true").ended_well()
    stages = sorted(result.of("memory"), key=lambda event: event["stage"])
    assert [each["stage"] for each in stages] == [0, 1]
    assert tuple(each["activation"] for each in stages) == ACTIVATIONS
    assert tuple(each["pending"] for each in stages) == PENDING
    assert tuple(each["weights"] for each in stages) == tuple(each["gradient"] for each in stages) == WEIGHTS
    assert [each["optimizer"] for each in stages] == [2 * size + FP32 * n for size, n in zip(WEIGHTS, COUNTS)]
    assert [(each["boundary"], each["frozen"], each["masters"]) for each in stages] == [(ONE, 8, 0), (0, 8, 0)]
    report.write(result.folder)
    memory = doctor(capsys, tmp_path, result.folder / "costs.json")
    assert memory["measured"] and [row["each"] for row in memory["stages"]] == [*ACTIVATIONS]
    assert [row["sums"] for row in memory["stages"]] == [*WEIGHTS]
    assert [row["undo"] for row in memory["stages"]] == [3 * size + FP32 * n for size, n in zip(WEIGHTS, COUNTS)]
    assert [row["kept"] for row in memory["stages"]] == [2 * 4 * ONE] * 2  # an activation and a gradient of each batch
    ran = {(span.instruction.step, str(span.instruction)[:2]) for span in read_traces(result.folder / "trace")}
    halves, whole = {"0I", "0W", "1I", "1W"}, {"0B", "1B"}
    both_ways = [{name for step, name in ran if step == at} & (halves | whole) for at in (WARM_UP + 1, WARM_UP + 2)]
    assert both_ways == [halves, whole], "backwards are not chosen, measured or named"


def doctor(capsys, tmp_path, costs):
    """What doctor says of memory with a run's ``costs``."""
    (config := tmp_path / "ds_config.json").write_text(
        json.dumps({"train_micro_batch_size_per_gpu": 1, "recycle": {"enabled": True}, "gradient_clipping": 0})
    )
    shape = ["--pp", "2", "--dp", "2", "--micro-batches", "2"]
    main(["doctor", str(config), *shape, "--profile", str(costs), "--json"])
    return json.loads(capsys.readouterr().out)["memory"]
