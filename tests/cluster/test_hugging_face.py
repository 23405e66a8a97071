"""Hugging Face's Trainer over sharded replicas: an unmodified script trains as with stock DeepSpeed, and survives the
loss of a replica wherever it is.

What a job trains is compared with stock, and after a loss with what one process makes of the same samples by hand.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint
from transformers import GPT2LMHeadModel

from tests.jobs.hugging_face_model import model
from tests.support.cluster import ForkServer, Result
from tests.support.hugging_face import LOOP, PLAIN, RANKS, Start, accuracy, by_hand, evaluated_once, history, starting

SAVING = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}
EVALUATING = {"eval_strategy": "steps", "eval_steps": 2}
BEST = SAVING | EVALUATING | {"load_best_model_at_end": True}


@pytest.fixture
def start(server: ForkServer, tmp_path: Path) -> Iterator[Start]:
    with starting(server, tmp_path) as start:
        yield start


def ended_well(result: Result) -> None:
    """Nothing was said that should not be, and all who are left have the same weights, to the bit."""
    assert result.code == 0, result.output[-6000:]
    assert not result.of("error") and not result.of("warning"), result.output[-6000:]
    first, *others = [record["weights"] for record in result.records.values()]
    assert all(other == first for other in others)


def same(ours: dict, stock: dict, rounding: float) -> None:
    for name in ("loss", "eval_loss", "eval_accuracy", "grad_norm", "learning_rate", "train_loss"):
        assert history(ours, name) == pytest.approx(history(stock, name), rel=rounding), name
    for name, values in stock["weights"].items():
        assert ours["weights"][name] == pytest.approx(values, abs=rounding)


HALF = {"bf16": True, "gradient_checkpointing": True, "label_smoothing_factor": 0.1, "max_steps": 4}
ODD = BEST | {"gradient_accumulation_steps": 4, "max_steps": -1, "num_train_epochs": 2}  # 7 batches an epoch


@pytest.mark.parametrize(
    "stage, more, rounding",
    [
        (1, {"arguments": ODD, "samples": 53}, 1e-4),
        (2, {"arguments": HALF, "uneven": True}, 2e-2),
        (3, {"arguments": SAVING | {"dataloader_num_workers": 2}, "uneven": True, "metrics": False}, 1e-4),
    ],
)
def test_as_stock(start, stage, more, rounding):
    ours, stock = start(stage=stage, **more), start(stage=stage, replicas=0, **more)
    ended_well(ours)
    assert stock.code == 0, stock.output[-6000:]
    for rank, record in stock.records.items():
        same(ours.records[rank], record, rounding)
        assert ours.records[rank]["written"] == [
            path.replace(str(stock.folder), str(ours.folder)) for path in record["written"]
        ]
        assert ours.records[rank]["evaluated"] == record["evaluated"]


@pytest.mark.parametrize("stage, kill", [(1, [3, "step", 3]), (3, [0, "step", 3]), (2, [2, "log", 2])])
def test_a_lost_replicas_samples_are_in_no_loss(start, stage, kill):
    """The others train the means over their own words, also where each sample has another number of them."""
    logged = kill[2] if kill[1] == "log" else 0
    result = start(stage=stage, kills=[kill], uneven=bool(logged), arguments=PLAIN)
    ended_well(result)
    assert any("a lost replica stays away" in said["text"] for said in result.of("data"))
    left = range(2, 4) if kill[0] < 2 else range(2)
    wanted = by_hand([range(RANKS)] * 2 + [left] * 6, uneven=bool(logged), logged=logged)
    assert len(result.records) == RANKS // 2
    for record in result.records.values():
        assert history(record) == pytest.approx(wanted.losses, rel=1e-4)
        for name, values in wanted.weights.items():
            assert record["weights"][name] == pytest.approx(values, abs=1e-5)
        evaluated_once(record)
        assert history(record, "eval_accuracy") == [
            pytest.approx(accuracy(wanted.model, uneven=bool(logged)), abs=1e-6)
        ]


@pytest.mark.parametrize("stage, kill", [(1, [0, "evaluating", 2]), (3, [3, "evaluating", 4])])
def test_an_evaluation_covers_each_sample_once_whoever_dies_in_it(start, stage, kill):
    result = start(stage=stage, kills=[kill], arguments=EVALUATING)
    ended_well(result)
    assert len(result.records) == RANKS // 2
    for record in result.records.values():
        evaluated_once(record)
        assert record["steps"] == 8 and len(history(record, "eval_loss")) == 5
    written = GPT2LMHeadModel.from_pretrained(result.folder / "model")
    assert history(record, "eval_accuracy")[-1] == pytest.approx(accuracy(written), abs=1e-6)


def test_the_next_process_writes_a_checkpoint_that_the_first_one_dies_in_and_fewer_replicas_go_on_from_it(start):
    """Three replicas of one rank; stock's files of the first replica are those of any."""
    more = {"arguments": SAVING | {"save_steps": 4}, "metrics": False}
    result = start(3, replicas=3, kills=[[0, "writing", 4]], **more)
    ended_well(result)
    checkpoint = result.folder / "out" / "checkpoint-4"
    assert GPT2LMHeadModel.from_pretrained(checkpoint).num_parameters() > 0
    assert [record["first"] for _, record in sorted(result.records.items())] == [True, False]
    again = start(2, replicas=2, resume=str(checkpoint), **more)
    ended_well(again)
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    assert state["global_step"] == 4 and len(state["log_history"]) == 4
    for record in again.records.values():
        assert history(record)[:4] == [line["loss"] for line in state["log_history"]]
        assert record["steps"] == 8 and len(history(record)) == 8


def test_the_best_model_is_loaded_and_a_run_stops_early_whoever_has_died(start):
    """The rate is so high that the first evaluation is the best."""
    more = {"learning_rate": 3.0, "dataloader_num_workers": 2, "train_sampling_strategy": "group_by_length"}
    result = start(stage=2, kills=[[0, "step", 3]], patience=1, arguments=BEST | more)
    ended_well(result)
    (record, _) = result.records.values()
    losses = history(record, "eval_loss")
    assert record["steps"] < 8 and record["best"].endswith("checkpoint-2")
    assert losses[-1] == record["after"]["eval_loss"] == pytest.approx(min(losses))
    evaluated_once(record, in_order=False)


def test_a_stream_that_each_rank_reads_goes_on_without_a_replica(start):
    """As a replica's loss in a step, where samples are dealt by their number."""
    apart = {"accelerator_config": {"dispatch_batches": False}}
    result = start(iterable=True, kills=[[1, "step", 3]], arguments=PLAIN | apart)
    ended_well(result)
    wanted = by_hand([range(RANKS)] * 2 + [range(2, 4)] * 6)
    for record in result.records.values():
        assert history(record) == pytest.approx(wanted.losses, rel=1e-4)


@pytest.mark.parametrize(
    "more, line",
    [
        ({"iterable": True}, "Accelerate reads these batches on process 0 alone"),
        ({"recycle": {"batch": "constant"}}, 'recycle.batch "constant" with Hugging Face\'s Trainer, which draws'),
        ({"arguments": {"torch_compile": True}}, "TrainingArguments(torch_compile=True) with recycle.replicas is not"),
    ],
)
def test_what_is_not_supported_is_refused_in_one_line_before_the_first_step(start, more, line):
    result = start(2, replicas=2, **more)
    (end,) = [said for said in result.output.splitlines() if "end: the job ends: " in said]
    assert result.code != 0 and line in end, result.output[-6000:]
    assert not result.of("committed")


EACH = [*range(20, 49)]  # the numbers of the samples that are evaluated
ODD_LOOP = {"script": LOOP, "samples": 53}  # 7 batches an epoch for each rank, in steps of two


def test_a_loop_with_accelerate_as_stock(start):
    ours, stock = start(stage=2, **ODD_LOOP), start(stage=2, replicas=0, **ODD_LOOP)
    ended_well(ours)
    assert stock.code == 0, stock.output[-6000:]
    for rank, record in stock.records.items():
        found = ours.records[rank]
        for name in ("steps", "trained", "rates", "evaluated", "right", "mains", "counted"):
            assert found[name] == record[name], name
        for name in ("losses", "epochs"):
            assert found[name] == pytest.approx(record[name], rel=1e-4), name
        for mine, theirs in zip(found["gathered"], record["gathered"], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-4)
        for name, values in record["weights"].items():
            assert found["weights"][name] == pytest.approx(values, abs=1e-5)


def test_a_loop_with_accelerate_goes_on_without_a_replica_and_from_its_checkpoint(start):
    """The others train their own shards, by the schedule of the whole job."""
    result, calm = start(kills=[[0, "step", 3]], **ODD_LOOP), start(**ODD_LOOP)
    ended_well(result)
    assert sorted(result.records) == [2, 3]
    for rank, record in result.records.items():
        for name in ("steps", "trained", "rates"):
            assert record[name] == calm.records[rank][name], name
        assert record["evaluated"] == [EACH, EACH] and record["mains"] == [rank == 2] * 2
    again = start(resume=str(result.folder / "out" / "epoch1"), **ODD_LOOP)
    ended_well(again)
    assert again.records[0]["losses"][0] < calm.records[0]["losses"][0]


@pytest.mark.parametrize("rank, batch", [(0, 3), (3, 2)])
def test_an_evaluation_of_accelerates_says_what_a_lost_replica_leaves_out(start, rank, batch):
    """The next one has each sample once."""
    result = start(kills=[[rank, "evaluating", batch]], **ODD_LOOP)
    assert result.code == 0 and not result.of("error"), result.output[-6000:]
    (warning,) = result.of("warning")
    lost = "0, 1" if rank == 0 else "2, 3"
    assert warning["text"].startswith(f"ranks {lost} were lost in an evaluation, whose metrics lack the samples that")
    for record in result.records.values():
        first, second = record["evaluated"]
        assert len(first) < len(EACH) and len(set(first)) == len(first) and {*first} < {*EACH}
        assert second == EACH


@pytest.mark.parametrize(
    "stage, odd, line", [(3, "dcp", "ZeRO 3 has sharded it"), (1, "dcp optimizer", "have different values")]
)
def test_shards_of_zeros_are_not_written_by_dcp_as_if_they_were_whole(start, stage, odd, line):
    """Stock writes one rank's part for all, and says nothing."""
    result = start(stage=stage, odd=odd, **ODD_LOOP)
    (end,) = [said for said in result.output.splitlines() if "end: the job ends: " in said]
    assert result.code != 0 and line in end and "call engine.save_checkpoint(folder)" in end, result.output[-6000:]
    assert not (result.folder / "dcp").exists()


def test_whole_weights_of_a_loop_with_accelerate_are_read_by_stock_dcp(start):
    result = start(odd="dcp", epochs=1, **ODD_LOOP)
    ended_well(result)
    found = {"model": {name: torch.full_like(value, torch.nan) for name, value in model().state_dict().items()}}
    torch.distributed.checkpoint.load(found, checkpoint_id=str(result.folder / "dcp"))
    first = model().state_dict()
    moved = [name for name, value in found["model"].items() if not torch.equal(value, first[name])]
    assert moved and all(value.isfinite().all() for value in found["model"].values())
