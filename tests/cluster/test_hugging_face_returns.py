"""Replicas of Hugging Face's Trainer that come back: an unmodified script goes on from the others' step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import GPT2LMHeadModel

from tests.support.cluster import ForkServer, Result
from tests.support.hugging_face import (
    PLAIN,
    RANKS,
    Start,
    accuracy,
    by_hand,
    evaluated_once,
    evaluation_loss,
    history,
    starting,
)

STEPS, HELD = 30, 5
RETURNS = {"samples": 8 * STEPS, "held": [HELD], "recycle": {"rejoin": "always"}}
# Held at a second step too, many steps behind the first: who comes back may be called off, and then comes a few later.
TWICE, LONGER = RETURNS | {"held": [HELD, HELD + 45]}, 3 * STEPS
SEVERAL = {"samples": 53, "held": [HELD], "recycle": {"rejoin": "always"}}  # 7 batches an epoch for each rank


@pytest.fixture
def start(server: ForkServer, tmp_path: Path) -> Iterator[Start]:
    with starting(server, tmp_path) as start:
        yield start


def returned(result: Result, *ranks: int) -> int:
    """The step from which on ``ranks`` take part again; nothing was said that should not be, and all have the same
    weights, to the bit.
    """
    assert result.code == 0, result.output[-6000:]
    assert not result.of("error") and not result.of("warning"), result.output[-6000:]
    rejoined = {event["rank"]: event["step"] for event in result.of("rejoined")}
    assert sorted(rejoined) == sorted(ranks), rejoined
    first, *others = [record["weights"] for record in result.records.values()]
    assert len(others) == RANKS - 1 and all(other == first for other in others)
    (step,) = {*rejoined.values()}
    return step


def goes_on(result: Result, calm: Result, first: int = 1) -> None:
    """Ranks 0 and 1 are back, and from then on draw what a job without a loss has drawn, by the same rates; ``first``:
    the step that the script began with.
    """
    step = returned(result, 0, 1)
    for rank, record in result.records.items():
        whole, begins = calm.records[rank]["trained"], step if rank < 2 else first
        assert record["trained"] == {str(each): whole[str(each)] for each in range(begins, STEPS + 1)}, rank
        assert history(record, "learning_rate") == pytest.approx(history(calm.records[rank], "learning_rate"))
        assert len(history(record)) == STEPS


@pytest.mark.parametrize("stage, kill", [(1, [3, "step", 3]), (3, [0, "step", 3]), (2, [2, "log", 2])])
def test_a_replica_that_comes_back_is_in_losses_and_weights_from_its_first_step_on(start, stage, kill):
    uneven, logged = kill[1] == "log", kill[2] if kill[1] == "log" else 0
    result = start(stage=stage, kills=[kill], uneven=uneven, arguments=PLAIN | {"max_steps": STEPS}, **RETURNS)
    lost = range(2) if kill[0] < 2 else range(2, 4)
    step, left = returned(result, *lost), range(2, 4) if kill[0] < 2 else range(2)
    live = [range(RANKS)] * 2 + [left] * (step - 3) + [range(RANKS)] * (STEPS - step + 1)
    wanted = by_hand(live, uneven=uneven, logged=logged, samples=RETURNS["samples"])
    for record in result.records.values():
        assert record["steps"] == STEPS
        assert history(record) == pytest.approx(wanted.losses, rel=1e-4)
        for name, values in wanted.weights.items():
            assert record["weights"][name] == pytest.approx(values, abs=1e-4)


def test_a_logged_loss_is_the_mean_of_its_steps_though_the_first_process_comes_back_between_them(start):
    arguments = PLAIN | {"max_steps": STEPS, "logging_steps": 6}
    result = start(kills=[[0, "step", 7]], arguments=arguments, metrics=False, **RETURNS | {"held": [9]})
    step = returned(result, 0, 1)
    live = [range(RANKS)] * 6 + [range(2, 4)] * (step - 7) + [range(RANKS)] * (STEPS - step + 1)
    losses = by_hand(live, samples=RETURNS["samples"]).losses
    means = [sum(losses[begin : begin + 6]) / 6 for begin in range(0, STEPS, 6)]
    for record in result.records.values():
        assert history(record) == pytest.approx(means, rel=1e-4)
        assert history(record, "train_loss") == pytest.approx([sum(losses) / STEPS], rel=1e-4)


ORDERS = [
    (1, {"lr_scheduler_type": "cosine", "gradient_accumulation_steps": 2}),
    (3, {"train_sampling_strategy": "group_by_length", "dataloader_num_workers": 2, "lr_scheduler_type": "linear"}),
    (2, {"accelerator_config": {"use_seedable_sampler": False}, "warmup_steps": 9}),
]


@pytest.mark.parametrize("stage, arguments", ORDERS)
def test_who_comes_back_draws_as_without_a_loss_by_the_same_rates(start, stage, arguments):
    """Over several epochs, of which the job is in the second one or a later one then."""
    arguments = arguments | {"max_steps": STEPS, "max_grad_norm": 0.5}
    held = {"held": [9]}
    result = start(stage=stage, kills=[[0, "step", 8]], arguments=arguments, metrics=False, **SEVERAL | held)
    calm = start(stage=stage, arguments=arguments, metrics=False, samples=SEVERAL["samples"])
    goes_on(result, calm)


@pytest.mark.parametrize("stage, kill", [(1, [0, "evaluating", 8]), (3, [3, "evaluating", 11])])
def test_a_replica_that_is_lost_in_an_evaluation_comes_back_and_evaluates(start, stage, kill):
    saved = {"save_strategy": "steps", "save_steps": 3}
    arguments = {"eval_strategy": "steps", "eval_steps": 3, "eval_on_start": True, "max_steps": STEPS} | saved
    job = {"kills": [kill], "uneven": True, "dropout": 0.2}
    result = start(stage=stage, arguments=arguments, **job, **RETURNS | {"held": [11]})
    step = returned(result, *(range(2) if kill[0] < 2 else range(2, 4)))
    for record in result.records.values():
        evaluated_once(record)
        assert len(history(record, "eval_loss")) == STEPS // 3 + 2
    first, *others = result.records.values()
    assert all(history(each, name) == history(first, name) for each in others for name in ("loss", "eval_loss"))
    written = GPT2LMHeadModel.from_pretrained(result.folder / "model")
    assert history(first, "eval_accuracy")[-1] == pytest.approx(accuracy(written, uneven=True), abs=1e-6)
    lost = 3 * (kill[2] // 3)  # the step behind which it is lost
    for evaluated, loss in zip(range(3, STEPS + 1, 3), history(first, "eval_loss")[1:]):
        gpt = GPT2LMHeadModel.from_pretrained(result.folder / "out" / f"checkpoint-{evaluated}")
        ranks = RANKS // 2 if lost <= evaluated < step else RANKS
        assert loss == pytest.approx(evaluation_loss(gpt, ranks, uneven=True), abs=1e-5), evaluated


def test_who_comes_back_as_the_first_process_writes_stops_early_and_loads_the_best_model(start):
    """No evaluation is as much better as asked for; it comes back behind the second one, and the fourth one is the
    last.
    """
    every = {"eval_strategy": "steps", "eval_steps": 5, "save_strategy": "steps", "save_steps": 5}
    arguments = every | {"load_best_model_at_end": True, "max_steps": STEPS}
    result = start(
        stage=2, kills=[[0, "step", 3]], patience=3, threshold=9.0, arguments=arguments, **RETURNS | {"held": [11]}
    )
    step = returned(result, 0, 1)
    assert 11 < step < 15
    for rank, record in result.records.items():
        assert record["steps"] == 20 and record["first"] == (rank == 0)
        assert record["after"]["eval_loss"] == pytest.approx(min(history(record, "eval_loss")))
    state = json.loads((result.folder / "out" / "checkpoint-20" / "trainer_state.json").read_text())
    assert [line["step"] for line in state["log_history"] if "loss" in line] == [*range(1, 21)]
    (exported,) = [each for name, each in state["stateful_callbacks"].items() if name == "EarlyStoppingCallback"]
    assert exported["attributes"] == {"early_stopping_patience_counter": 3}


def test_a_job_that_has_resumed_is_come_back_to(start):
    """From a checkpoint in the middle of an epoch."""
    saved = start(arguments={"save_strategy": "steps", "save_steps": 5, "max_steps": 5}, metrics=False, samples=53)
    more = {"resume": str(saved.folder / "out" / "checkpoint-5"), "arguments": {"max_steps": STEPS}, "metrics": False}
    result = start(kills=[[0, "step", 8]], **more, **SEVERAL | {"held": [10]})
    calm = start(samples=SEVERAL["samples"], **more)
    goes_on(result, calm, first=6)


@pytest.mark.parametrize("resume", ["last", "deleted"])
def test_a_script_that_looks_for_a_checkpoint_finds_one_of_the_others_and_goes_on_from_their_step(start, resume):
    arguments = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1, "max_steps": STEPS}
    result = start(
        stage=3, kills=[[0, "step", 8]], resume=resume, arguments=arguments, metrics=False, **RETURNS | {"held": [10]}
    )
    assert not (result.folder / "out" / "checkpoint-2").exists()
    calm = start(stage=3, arguments={"max_steps": STEPS}, metrics=False, samples=RETURNS["samples"])
    goes_on(result, calm)


def test_a_stream_that_each_rank_reads_goes_on_in_who_comes_back(start):
    apart = {"accelerator_config": {"dispatch_batches": False}, "max_steps": STEPS}
    result = start(iterable=True, kills=[[1, "step", 3]], arguments=PLAIN | apart, metrics=False, **RETURNS)
    step = returned(result, 0, 1)
    live = [range(RANKS)] * 2 + [range(2, 4)] * (step - 3) + [range(RANKS)] * (STEPS - step + 1)
    wanted = by_hand(live, samples=RETURNS["samples"])
    for record in result.records.values():
        assert history(record) == pytest.approx(wanted.losses, rel=1e-4)


@pytest.mark.parametrize("stage, where", [(3, "beginning"), (1, "step")])
def test_who_dies_as_it_comes_back_comes_back_once_more(start, stage, where):
    """Others wait for it then, with the words of their batches, or in the step."""
    kills = [[0, "step", 3], [0, where, 0, 1]]
    result = start(stage=stage, kills=kills, arguments=PLAIN | {"max_steps": LONGER}, metrics=False, **TWICE)
    assert result.code == 0 and not result.of("error"), result.output[-6000:]
    assert {rank: record["incarnation"] for rank, record in result.records.items()} == {0: 2, 1: 2, 2: 0, 3: 0}
    first, *others = result.records.values()
    assert all(other["weights"] == first["weights"] for other in others)
    assert all(history(other) == history(first) for other in others) and len(history(first)) == LONGER


def test_the_next_process_gives_the_loop_where_one_dies_in_that(start):
    """Three replicas of one rank, of which two come back, one after the other."""
    kills = [[2, "step", 3], [0, "giving", 0]]
    arguments = PLAIN | {"max_steps": LONGER}
    result = start(3, replicas=3, kills=kills, arguments=arguments, metrics=False, **TWICE)
    assert result.code == 0 and not result.of("error"), result.output[-6000:]
    assert {rank: record["incarnation"] for rank, record in result.records.items()} == {0: 1, 1: 0, 2: 1}
    first, *others = result.records.values()
    assert all(other["weights"] == first["weights"] for other in others)
    assert all(history(other) == history(first) for other in others) and len(history(first)) == LONGER


REFUSED = [
    ({"own": True}, "recycle.rejoin with a get_batch_samples() that does not call Trainer's"),
    (
        {"kills": [[1, "step", 3], [0, "giving", 0]], "held": [HELD]},
        "all ranks that had the state of Trainer's loop were lost while others came back",
    ),
]


@pytest.mark.parametrize("more, line", REFUSED)
def test_what_can_not_come_back_ends_in_one_line(start, more, line):
    result = start(2, replicas=2, arguments={"max_steps": STEPS}, **{"recycle": {"rejoin": "always"}} | more)
    (end,) = [said for said in result.output.splitlines() if "end: the job ends: " in said]
    assert result.code != 0 and line in end, result.output[-6000:]
