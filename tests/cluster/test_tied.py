"""A GPT whose head's weights are its embedding's: trained as stock DeepSpeed trains it, whoever of the stages that
share them dies when.
"""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch

from recycle_plugin.core.vocabulary.instruction import COMPUTE, Instruction, Op
from recycle_plugin.observability.trace import read_traces
from tests.support.jobs import (
    LOSS_TOLERANCE,
    PARAMETER_TOLERANCE,
    WRAPPED,
    Shape,
    assert_same_training,
    difference,
    faults,
)
from tests.support.kills import FIRST, SECOND, matrix, struck

MORE = pytest.mark.all_kills
TIED = "model.tied=true"


OFF = ("recycle.split_backward=false", "recycle.stagger_optimizer=false", "recycle.reroute=false", "recycle.rng=stream")


@pytest.mark.parametrize(
    "settings",
    (
        pytest.param((), id="Adam"),
        pytest.param(
            ("optimizer=sgd", "gradient_clipping=0.05", "recycle.norm=deepspeed"), id="SGD, clipped", marks=MORE
        ),
    ),
)
def test_fault_free_it_is_what_stock_trains(launch, settings):
    """Up to the order of one sum: stock adds up over the stages first, and then over the replicas."""
    stock, mine = launch(TIED, "recycle.enabled=false", *settings).finish(), launch(TIED, *OFF, *settings).finish()
    assert stock.code == mine.code == 0 and mine.of("start") and not stock.of("start"), (
        stock.output[-6000:] + mine.output[-6000:]
    )
    assert mine.losses == pytest.approx(stock.losses, abs=LOSS_TOLERANCE)
    for rank in stock.records:
        ours, theirs = mine.parameters(rank), stock.parameters(rank)
        delta, norm = (
            sum(each.double().pow(2).sum().item() for each in side)
            for side in ([ours[name] - theirs[name] for name in theirs], theirs.values())
        )
        print(
            f"rank {rank}: parameters differ by {(delta / norm) ** 0.5:.2g}, losses by "
            f"{max(abs(a - b) for a, b in zip(mine.losses, stock.losses)):.2g}"
        )
        assert (delta / norm) ** 0.5 <= PARAMETER_TOLERANCE
    assert copies_are_equal(mine)
    first, last = (mine.parameters(mine.rank_of(seat)) for seat in ("0.0", "0.1"))
    whole = sum(each.numel() for each in (*first.values(), *last.values()))
    tied = sum(each.numel() for name, each in last.items() if name.endswith("embedding.tokens.weight"))
    said = {event["stage"]: event for event in mine.of("stage")}
    assert 0 < tied < whole and sum(event["parameters"] for event in said.values()) == whole - tied
    assert "Embedding" in said[0]["layers"][0], "in the order in which they run"


def copies_are_equal(result, weight: str = "embedding.tokens.weight", stages: int = 2) -> bool:
    copies = {
        result.seat_of(rank) if result.pids else rank: result.parameters(rank).get(f"tied_modules.{weight}")
        for rank in result.records
    }
    found = [copy for copy in copies.values() if copy is not None]
    assert (
        result.pids == {}
        or len({seat.partition(".")[2] for seat, copy in copies.items() if copy is not None}) == stages
    )
    return all(torch.equal(found[0], copy) for copy in found)


KILLS = {
    "the first stage, at W": ("kill 1.0 before 0W1.1@5",),
    "the last stage, before its own sum": ("kill 0.1 before 1REDUCE@5",),
    "the first stage, before TIE, then the last after TIE": ("kill 0.0 before 0TIE@5", "kill 1.1 after 1TIE@12"),
    "the last stage, before TIE, then the first after it": ("kill 0.1 before 1TIE@5", "kill 1.0 after 0TIE@12"),
    "around STEP": ("kill 1.0 before 0STEP@5", "kill 0.1 after 1STEP@12"),
    "while recovering": ("kill 0.1 before 1TIE@7", "kill 1.0 at recovery.resume:2"),
    "while recovering, before TIE": ("kill 0.1 before 1TIE@7", "kill 1.0 before 0TIE@7:2"),
    "both ends of a replica at once": ("kill 0.0 before 0TIE@7", "kill 0.1 before 1TIE@7"),
}
DEFAULT = ("while recovering, before TIE",)


@pytest.mark.parametrize(
    "kills", [pytest.param(kills, id=name, marks=() if name in DEFAULT else MORE) for name, kills in KILLS.items()]
)
def test_killed_wherever_stages_share_weights(launch, reference, kills):
    result = launch(faults(*kills), TIED).finish()
    assert {event["fault"] for event in result.of("fault")} == set(kills)
    assert_same_training(result, reference(TIED), {kill.split()[1] for kill in kills})
    assert copies_are_equal(result)


@MORE
@pytest.mark.parametrize("first, second", [pytest.param(*pair, id=f"{pair[0]}, {pair[1]}") for pair in matrix()])
def test_each_rank_at_named_instructions(launch, reference, first, second):
    """The list of the main job, without ties."""
    result = launch(TIED, faults(first.at(FIRST), second.at(SECOND))).finish()
    assert_same_training(result, reference(TIED), {first.seat, second.seat})
    assert struck(result) == {first.at(FIRST), second.at(SECOND)} and copies_are_equal(result)


@pytest.mark.parametrize("loser, ahead", (("0.0", 1), pytest.param("0.1", 0, marks=MORE)))
def test_who_has_no_result_gets_it_from_the_others_and_they_stay_stepped(launch, reference, loser, ahead):
    """All take part in TIE; one has not heard what came out when a worker of the other stage, which has stepped,
    dies.
    """
    wrap = json.dumps({"name": "lose_tied", "seats": [loser], "step": 7})
    kill = f"kill 1.{ahead} after {ahead}STEP@7"
    result = launch(faults(kill), TIED, "recycle.trace=true", script=WRAPPED, RECYCLE_TEST_WRAP=wrap).finish()
    assert_same_training(result, reference(TIED), {f"1.{ahead}"})
    ran = Counter(
        (str(span.seat), span.instruction)
        for span in read_traces(result.folder / "trace")
        if span.instruction.step == 7
    )
    assert {count for (_, one), count in ran.items() if one.op in COMPUTE} == {1}, "nothing is run again"
    assert {ran[seat, Instruction(Op.STEP, int(seat[-1]), None, 7)] for seat in {"0.0", "0.1", f"1.{1 - ahead}"}} == {1}
    assert copies_are_equal(result)
    assert ran[f"0.{ahead}", Instruction(Op.TIE, ahead, None, 7)] == 2, "for the one that lacks it"


THREE = Shape(stages=3)
TWO_TIES = {"RECYCLE_TEST_WRAP": json.dumps({"name": "mixers", "after": [0, 1]})}


@pytest.mark.all_kills
@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(("kill 0.1 before 1TIE@6", "kill 1.2 after 2TIE@12"), id="middle and last"),
        pytest.param(
            ("kill 1.0 before 0REDUCE@6", "kill 0.1 after 1STEP@6"), id="first and middle, in one step", marks=MORE
        ),
    ],
)
def test_several_ties(launch, kills):
    """The embedding is on the first and the last of three stages, another weight on the first two."""
    calm = launch(TIED, shape=THREE, script=WRAPPED, **TWO_TIES).finish()
    assert calm.of("start")[0]["job"]["ties"] == [[0, 1, 2]]
    result = launch(TIED, faults(*kills), shape=THREE, script=WRAPPED, **TWO_TIES).finish()
    assert_same_training(result, calm, {kill.split()[1] for kill in kills})
    assert copies_are_equal(result) and copies_are_equal(result, "mixer.weight")


@MORE
@pytest.mark.parametrize("undo", ("snapshot", "inverse"))
def test_a_stage_between_takes_its_step_back(launch, reference, tmp_path, undo):
    """The first and the last of three stages share the embedding; the one between has stepped, and nobody has replica
    0's boundary tensors any more.
    """
    gate = {
        "name": "gate",
        "folder": str(tmp_path / "gate"),
        "before": "2REDUCE@7",
        "until": "1STEP@7",
        "by": ["0.1", "1.1"],
    }
    kills = "kill 0.1 after 1STEP@7", "kill 0.2 before 2REDUCE@7"
    result = launch(
        TIED, faults(*kills), f"recycle.undo={undo}", shape=THREE, script=WRAPPED, RECYCLE_TEST_WRAP=json.dumps(gate)
    ).finish()
    assert_same_training(result, reference(TIED, shape=THREE), {"0.1", "0.2"})
    assert {event["seat"] for event in result.of("recovery_plan") if event["undone"]} == {"1.1"}
    assert copies_are_equal(result)


@MORE
def test_all_on_one_stage_is_no_tie(launch):
    one = Shape(stages=1)
    stock, mine = (launch(TIED, *more, shape=one).finish() for more in (("recycle.enabled=false",), OFF))
    assert stock.code == mine.code == 0 and mine.of("start")[0]["job"]["ties"] == []
    assert mine.losses == pytest.approx(stock.losses, abs=LOSS_TOLERANCE)


@MORE
@pytest.mark.parametrize("clip", ("validate", "sync"))
def test_a_tied_weight_counts_once_in_the_norm(launch, tmp_path, clip):
    """The norm that gradients are clipped by, against that of all gradients, of which the tied one is on both
    stages.
    """
    folder = tmp_path / "norms"
    wrap = json.dumps([{"name": "record_norms", "folder": str(folder)}])
    settings = TIED, "optimizer=sgd", "gradient_clipping=0.05", f"recycle.clip={clip}"
    result = launch(*settings, faults("kill 1.1 before 1TIE@6"), script=WRAPPED, RECYCLE_TEST_WRAP=wrap).ended_well()
    rows = {
        rank: [tuple(map(float, line.split())) for line in (folder / f"rank{rank}.txt").read_text().splitlines()]
        for rank in result.records
    }
    first, last = (next(rank for rank in rows if result.stage_of(rank) == stage) for stage in (0, 1))
    assert len(rows[first]) >= 20 and {norm for norm, *_ in rows[first]} == {norm for norm, *_ in rows[last]}
    for (norm, squares, tied), (_, others, also) in zip(rows[first][-5:], rows[last][-5:]):
        assert tied == also > 0.01 * squares
        assert norm == pytest.approx((squares + others - tied) ** 0.5, rel=1e-6)


@MORE
@pytest.mark.parametrize(
    "kills",
    (("kill 0.1 before 1TIE@5", "kill 1.0 after 0W1.1@12"), ("kill 0.0 after 0TIE@5",)),
    ids=("last, first", "first"),
)
def test_exact_is_bit_for_bit(launch, reference, kills):
    calm = reference(TIED, "recycle.exact=true")
    result = launch(TIED, "recycle.exact=true", faults(*kills)).finish()
    assert_same_training(result, calm, {kill.split()[1] for kill in kills})
    assert result.losses == calm.losses
    for rank in result.records:
        mine, theirs = result.parameters(rank), calm.parameters(calm.rank_of(result.seat_of(rank)))
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


CHECKED = "recycle.check_replicas=4"


@MORE
def test_copies_are_compared_over_the_stages(launch, reference):
    """Of two replicas of a stage nobody knows which is right; the other stage's copies of the weight say it."""
    wrap = json.dumps({"name": "flip_bit", "seat": "1.1", "step": 6})
    result = launch(TIED, CHECKED, script=WRAPPED, RECYCLE_TEST_WRAP=wrap).finish()
    assert_same_training(result, reference(TIED), {"1.1"})
    assert result.of("lost")[0]["how"] == "its copy of embedding.tokens.weight after step 8 is unlike the others"


@pytest.mark.parametrize(
    "stage, factor",
    ((1, 0), pytest.param(0, 0, marks=MORE), pytest.param(1, 2, marks=MORE), pytest.param(0, 2, marks=MORE)),
)
def test_a_part_left_out_or_counted_twice_would_be_seen(launch, reference, stage, factor):
    wrap = json.dumps({"name": "scale_tied", "stage": stage, "factor": factor})
    result = launch(TIED, faults("kill 0.1 before 1TIE@10"), script=WRAPPED, RECYCLE_TEST_WRAP=wrap).ended_well()
    found = difference(result, reference(TIED))
    print(
        f"stage {stage} counted {factor} times: losses differ by {found.loss:.2g}, parameters by {found.parameters:.2g}"
    )
    assert found.exceeds(10)


def test_a_checkpoint_is_loaded_whoever_is_lost(launch, reference, tmp_path):
    """Only the first stage's copy is in the file, and the worker from which stock would give it to the others dies
    before it has loaded.
    """
    plan = {"folder": str(tmp_path / "saved"), "save_at": [3], "load_at": 7, "load_step": 3}
    kills = faults("kill 1.1 before 1TIE@5", "kill 0.0 at load.start")
    result = launch(TIED, kills, script="tests/jobs/checkpoint.py", RECYCLE_TEST_CHECKPOINT=json.dumps(plan)).finish()
    assert result.code == 0 and {event["seat"] for event in result.of("lost")} == {"0.0", "1.1"}, result.output[-6000:]
    calm = reference(TIED).losses
    assert result.losses == pytest.approx(calm[:7] + calm[3:], abs=LOSS_TOLERANCE) and copies_are_equal(result)
