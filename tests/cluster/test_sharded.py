"""Sharded replicas in a script's own loop: a replica goes whole, the others train its part, and it comes back shard by
shard.

What a job has trained is compared with stock DeepSpeed on all ranks, which trains the same samples in each step: those
of the ledger that the ranks have kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from tests.jobs.stateful import order
from tests.support.cluster import ForkServer
from tests.support.sharded import (
    HELD,
    LONG,
    RANKS,
    ROUNDING,
    Start,
    ended_well,
    ledger,
    starting,
    trained_as_stock,
    weights,
)


@pytest.fixture
def start(server: ForkServer, tmp_path: Path) -> Iterator[Start]:
    with starting(server, tmp_path) as start:
        yield start


@pytest.mark.parametrize("stage, kind", [(0, "fp32"), (1, "fp32"), (2, "bf16"), (3, "fp32")])
def test_as_stock_with_all_ranks(start, stage, kind):
    ours, stock = start(stage=stage, kind=kind), start(stage=stage, kind=kind, replicas=0)
    ended_well(ours)
    assert {each["surprises"] for each in ours.records.values()} == {0}, "the boundary was where it was said to be"
    assert stock.code == 0, stock.output[-6000:]
    of_first = [each["losses"][micro] for each in stock.records.values() for micro in (0, 1)]
    assert ours.of("loss")[0]["loss"] == pytest.approx(sum(of_first) / len(of_first), abs=ROUNDING[kind])
    for rank, each in stock.records.items():
        assert ours.records[rank]["losses"] == pytest.approx(each["losses"], abs=ROUNDING[kind])
        assert weights(ours.records[rank]) == pytest.approx(weights(each), abs=ROUNDING[kind])


@pytest.mark.parametrize("stage", (2, 3))
def test_a_layer_that_a_micro_batch_leaves_out_has_no_gradient_of_it(start, stage):
    """At stage 0 torch itself adds gradients up; at stage 3 stock DeepSpeed counts those before once more."""
    found, whole = start(stage=stage, seldom=True), start(stage=0, seldom=True)
    ended_well(found)
    ended_well(whole)
    for rank, each in whole.records.items():
        assert weights(found.records[rank]) == pytest.approx(weights(each), abs=ROUNDING["fp32"])


WHERE = {
    "in a forward, while others gather": {"kills": [[2, 6, "forward"]]},
    "in a backward, while others reduce": {"kills": [[1, 7, "backward"]]},
    "before the exchange": {"faults": ["kill 1.0 before 0REDUCE@4"], "averages": True},
    "behind the exchange": {"faults": ["kill 0.0 after 0REDUCE@4"]},
    "in stock's own step": {"kills": [[3, 4, "step"]], "averages": True},
    "in a gather of ZeRO's": {"kills": [[3, 6, "gather"]], "averages": True},
}


NONE = (0, "in a gather of ZeRO's")  # stage 0 has none


@pytest.mark.some_of(6)
@pytest.mark.parametrize("stage, where", [each for each in product(range(4), WHERE) if each != NONE])
def test_whoever_is_killed_its_replica_goes_and_its_samples_are_drawn_by_the_others(start, stage, where):
    result = start(stage=stage, recycle={"rejoin": "never"}, **WHERE[where])
    ended_well(result)
    trained_as_stock(start, result, stage)


@pytest.mark.parametrize("stage, kind", [(0, "fp32"), (1, "fp32"), (3, "fp32"), (3, "bf16")])
def test_a_replica_comes_back_and_begins_at_the_others_step(start, stage, kind):
    """Each step is clipped, and followed with the same rounding; what it trains from its first step on is stock's."""
    kills = [[2, 7, "backward"]]
    result = start(stage=stage, kind=kind, odd=True, clip=0.01, kills=kills, held=[HELD], steps=LONG, averages=True)
    ended_well(result)
    for what in ("lost", "restart", "newcomer", "caught_up", "rejoined"):
        assert sorted(event["rank"] for event in result.of(what)) == [2, 3], what
    assert {event["in_vain"] for event in result.of("restart")} == {0}
    back = [result.records[rank] for rank in (2, 3)]
    assert {each["surprises"] for each in back} == {0}
    assert {each["incarnation"] for each in back} == {1} and HELD <= back[0]["first"] == back[1]["first"] < LONG
    assert {len(samples) for step, samples in back[0]["used"].items() if int(step) > back[0]["first"]} == {2}
    stock = start(stage=stage, kind=kind, odd=True, clip=0.01, steps=LONG, replicas=0, ledger=ledger(result, RANKS))
    for each in result.records.values():
        assert weights(each) == pytest.approx(weights(stock.records[0]), abs=ROUNDING[kind])


@pytest.mark.parametrize("stage, rank", [(0, 0), (2, 2), (3, 2)])
def test_steps_shrink_while_a_replica_is_out_and_are_those_of_stock_with_what_they_have(start, stage, rank):
    """Stock does each sample of a smaller step once more, so that their mean is the same, at the scaled rate."""
    result = start(stage=stage, kills=[[rank, 7, "backward"]], held=[HELD], steps=LONG, rates="script", shrinks=True)
    ended_well(result)
    assert sorted(event["rank"] for event in result.of("rejoined")) == [rank, rank + 1]
    shrunk = {str(event["step"]): event["rate_factor"] for event in result.of("committed") if "rate_factor" in event}
    assert {"4", str(HELD)} < shrunk.keys() and {round(factor, 6) for factor in shrunk.values()} == {0.707107}
    of_steps: dict[str, dict[str, list[int]]] = {}
    for name, each in result.records.items():
        for step, samples in each["used"].items():
            of_steps.setdefault(step, {})[str(name)] = samples
    for rank_lost in (rank, rank + 1):  # what its predecessor has trained
        for line in (result.folder / "drawn" / f"{rank_lost}.0").read_text().splitlines():
            step, sample = line.split()
            if int(step) < 4:
                of_steps.setdefault(step, {}).setdefault(str(rank_lost), []).append(int(sample))
    for step, of_ranks in of_steps.items():
        assert all(len(samples) == 2 for samples in of_ranks.values()), (step, of_ranks)
        assert (len(of_ranks) == 2) == (step in shrunk), step
        there = [samples for _, samples in sorted(of_ranks.items())]
        of_steps[step] = {str(number): there[number % len(there)] for number in range(RANKS)}
    stock = start(stage=stage, replicas=0, steps=LONG, rates="script", ledger=of_steps, factors=shrunk)
    assert stock.code == 0, stock.output[-6000:]
    for each in result.records.values():
        assert weights(each) == pytest.approx(weights(stock.records[0]), abs=5 * ROUNDING["fp32"])


def test_no_sample_is_trained_twice_where_scripts_skip_by_the_data_cursor(start, tmp_path):
    """One replica has drawn for the other before it is lost itself."""
    faults = ["kill 1.0 before 0REDUCE@25"]
    result = start(stage=1, kills=[[0, 7, "backward"]], faults=faults, held=[HELD, 28], steps=LONG + 20)
    ended_well(result)
    assert [event["rank"] for event in result.of("rejoined")] in (
        [0, 1, 2, 3],
        [1, 0, 2, 3],
        [0, 1, 3, 2],
        [1, 0, 3, 2],
    )
    first = {rank: each["first"] for rank, each in result.records.items()}
    trained = [sample for each in result.records.values() for of_step in each["used"].values() for sample in of_step]
    for rank in first:  # and what those who were lost had trained: no more than was drawn by the step before
        lines = [line.split() for line in (tmp_path / "run0" / "drawn" / f"{rank}.0").read_text().splitlines()]
        lost = 4 if rank < 2 else 25
        trained += [int(sample) for step, sample in lines if int(step) < lost]
    assert len(trained) == len(set(trained)) == RANKS * 2 * (LONG + 20)


def test_the_data_cursor_is_known_where_all_who_are_left_have_come_back_themselves(start):
    """The others have the sum of the step in which the second replica is lost."""
    faults = ["kill 0.0 after 0REDUCE@25"]
    result = start(stage=1, kills=[[2, 7, "backward"]], faults=faults, held=[HELD, 28], steps=LONG + 20)
    ended_well(result)
    assert {each["rank"] for each in result.of("rejoined")} == set(range(RANKS))
    assert {rank: result.records[rank]["cursor"] >= 24 * 2 for rank in (0, 1)} == {0: True, 1: True}


def test_scripts_that_all_end_in_the_middle_of_a_step_end_the_job_as_in_stock(start):
    result = start(stage=3, stops=dict.fromkeys(map(str, range(RANKS)), 7))
    assert result.code == 0 and not result.of("error") + result.of("warning"), result.output[-6000:]
    assert [event["step"] for event in result.of("data")] == [4] and result.of("finished")[0]["step"] == 3


@pytest.mark.parametrize("rank, calls", [(0, 7), (3, 8)])
def test_a_loop_that_ends_on_one_rank_in_the_middle_of_a_step_is_named(start, rank, calls):
    """Its replica's other rank waits for it in a gather of ZeRO's, and the other replica in the exchange."""
    result = start(stage=3, stops={str(rank): calls})
    step = calls // 2
    said = f"(rank {rank}) ended after step {step}"
    assert result.code != 0 and said in result.of("end")[0]["text"], result.output[-6000:]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_checkpoint_that_was_written_without_a_replica_is_read_by_stock(start, tmp_path, stage):
    result = start(stage=stage, kills=[[0, 7, "backward"]], saves=[6], steps=8)
    ended_well(result)
    go_on = {"stage": stage, "load": str(tmp_path / "run0" / "saved"), "steps": 8}
    stock = start(2, replicas=0, accumulation=4, ledger=ledger(result, 2, 4), **go_on)
    again = start(ledger=ledger(result, RANKS), **go_on)
    ended_well(again)
    assert stock.code == 0, stock.output[-6000:]
    for each in (*stock.records.values(), *again.records.values()):
        assert each["first"] == 6
        assert weights(each) == pytest.approx(weights(result.records[2]), abs=ROUNDING["fp32"])


def test_loaders_with_states_go_on_where_the_script_has_saved_them(start, tmp_path):
    """The first job has lost a replica, which has no state in the checkpoint; one of the second comes back."""
    first = start(seed=1, kills=[[0, 7, "backward"]], saves=[6], steps=6, recycle={"rejoin": "never"})
    ended_well(first)
    saved = str(tmp_path / "run0" / "saved")
    second = start(seed=11, kills=[[2, 7, "backward"]], held=[12], steps=LONG, load=saved)
    ended_well(second)
    assert sorted(event["rank"] for event in second.of("rejoined")) == [2, 3]
    used: dict[int, list[int]] = {
        rank: [
            sample
            for each in (first, second)
            if rank in each.records
            for of in each.records[rank]["used"].values()
            for sample in of
        ]
        for rank in range(RANKS)
    }
    for run, ranks, lost in ((0, (0, 1), 4), (1, (2, 3), 6 + 4)):  # what those who were lost had trained
        for rank in ranks:
            lines = [line.split() for line in (tmp_path / f"run{run}" / "drawn" / f"{rank}.0").read_text().splitlines()]
            used[rank] += [int(sample) for step, sample in lines if int(step) < lost]
    everything = [sample for samples in used.values() for sample in samples]
    assert len(everything) == len(set(everything)) == RANKS * 2 * LONG, "each sample of a step counts, none twice"
    for rank in (2, 3):  # in the order of the first job's loader, and none is left out
        mine = order(10_000 // RANKS, 1 + rank)[: len(used[rank])]
        assert sorted(used[rank]) == sorted(rank + RANKS * place for place in mine)


def test_a_loss_over_all_tokens_times_the_world_size_stays_right_where_sums_are_scaled(start):
    more = {"counts": True, "kills": [[0, 7, "backward"]], "recycle": {"rejoin": "never", "group_sums": "scale"}}
    result = start(stage=1, **more)
    ended_well(result)
    trained_as_stock(start, result, 1)


TOUCHES = [(0, "clip"), (0, "drop"), (0, "halve"), *product((1, 2, 3), ("clip", "drop", "halve"))]


@pytest.mark.some_of(6)
@pytest.mark.parametrize("stage, touches", TOUCHES)
def test_what_scripts_make_of_gradients_between_backward_and_step_counts(start, stage, touches):
    """As with stock on all ranks, calm and when a replica is lost; the norms that they read are of the sum over all."""
    more = {"stage": stage, "touches": touches, "clip": 0.0}
    ours, stock = start(**more), start(**more, replicas=0)
    ended_well(ours)
    assert stock.code == 0, stock.output[-6000:]
    for rank, each in stock.records.items():
        assert ours.records[rank]["norms"] == pytest.approx(each["norms"], rel=1e-4)
        assert weights(ours.records[rank]) == pytest.approx(weights(each), abs=ROUNDING["fp32"])
    lost = start(**more, kills=[[0, 7, "backward"]], recycle={"rejoin": "never"})
    ended_well(lost)
    stock = start(**more, replicas=0, ledger=ledger(lost, RANKS))
    for each in lost.records.values():
        assert each["norms"] == pytest.approx(stock.records[0]["norms"], rel=1e-4)
        assert weights(each) == pytest.approx(weights(stock.records[0]), abs=ROUNDING["fp32"])


@pytest.mark.some_of(3)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("where", ("before 0STEP@4", "after 0REDUCE@4", "after 0STEP@4"))
def test_all_apply_the_same_gradient_where_each_script_makes_its_own(start, stage, where):
    """Noise of each rank's own; somebody is lost with the sum, and somebody comes back while scripts change it.  At
    stage 0 each rank of a replica steps all weights, with stock too, so that they have two kinds.
    """
    more = {"held": [HELD], "steps": LONG, "touches": "noise", "clip": 0.0}
    result = start(stage=stage, faults=[f"kill 1.0 {where}"], **more)
    ended_well(result, 1 if stage else 2)
    assert sorted(event["rank"] for event in result.of("rejoined")) == [2, 3]


@pytest.mark.parametrize("stage, said", [(1, "Gradients are only available"), (3, "gradients with recycle.replicas")])
def test_gradients_before_the_last_backward_of_a_step_are_refused(start, stage, said):
    result = start(stage=stage, touches="early")
    assert result.code != 0 and said in result.of("end")[0]["text"], result.output[-6000:]


GATHERS = {"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}}
LINES = {"csv_monitor": {"enabled": True, "job_name": "job"}, "steps_per_print": 1}


@pytest.mark.parametrize("stage, config", [(0, {}), (2, {}), (3, GATHERS)])
def test_what_stock_leaves_to_rank_0_is_done_by_the_lowest_live_rank(start, tmp_path, stage, config):
    """The replica of rank 0 is lost in step 4: weights in one file, a checkpoint's shared weights and scripts,
    monitors, and progress.
    """
    lines = LINES | {"csv_monitor": LINES["csv_monitor"] | {"output_path": str(tmp_path)}}
    more = {"exports": [2, 6], "saves": [6], "config": config | lines, "recycle": {"rejoin": "never"}}
    result = start(stage=stage, kills=[[0, 7, "backward"]], steps=8, **more)
    ended_well(result)
    exported = tmp_path / "run0" / "exported"
    assert {each.read_text() for each in exported.glob("said*")} == {"True"} and len([*exported.glob("said6*")]) == 2
    at = {step: torch.load(exported / f"{step}.bin", weights_only=True) for step in (2, 6)}
    assert at[6].keys() == at[2].keys() and {"twin.weight", "layers.0.bias"} <= at[6].keys()
    assert not any(torch.equal(at[6][name], at[2][name]) for name in at[6])
    if stage:
        whole = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "run0" / "saved")
        assert whole.keys() == at[6].keys() and all(torch.equal(at[6][name], whole[name]) for name in whole)
    if stage == 3:
        for name in ("consolidated2.0.bin", "consolidated6.2.bin"):
            again, same = torch.load(exported / name, weights_only=True), at[int(name[12])]
            assert again.keys() == same.keys() and all(torch.equal(again[each], same[each]) for each in again)
    rates = (tmp_path / "job" / "Train_Samples_lr.csv").read_text().splitlines()
    assert [row.partition(",")[0] for row in rates] == ["step", *(str(8 * step) for step in range(1, 9))]
    assert all(result.output.count(f"step={step}, skipped=0") == 1 for step in range(1, 9))


def test_the_next_rank_writes_all_weights_where_rank_0_dies_in_it(start, tmp_path):
    faults = ["kill 0.0 at checkpoint.file"]
    result = start(stage=3, faults=faults, exports=[4], config=GATHERS, steps=6, recycle={"rejoin": "never"})
    ended_well(result)
    exported = tmp_path / "run0" / "exported"
    assert {each.name for each in exported.iterdir()} == {"4.bin", "consolidated4.2.bin", "said4.2.0", "said4.3.0"}
    assert torch.load(exported / "4.bin", weights_only=True).keys() >= {"twin.weight"}


@pytest.mark.parametrize("stage, rank", [(1, 0), (3, 2)])
def test_checkpoints_are_saved_while_a_replica_comes_back(start, tmp_path, stage, rank):
    """Those who come back have no part in what scripts do between steps before they are given work."""
    saves = [*range(HELD, LONG)]
    result = start(stage=stage, kills=[[rank, 7, "backward"]], held=[HELD], steps=LONG, saves=saves)
    ended_well(result)
    assert sorted(event["rank"] for event in result.of("rejoined")) == [rank, rank + 1]
    for step in saves:
        of_shards = [*(tmp_path / "run0" / "saved" / f"global_step{step}").glob("*_optim_states.pt")]
        assert len(of_shards) == RANKS / 2, step


@pytest.mark.parametrize("steps", [HELD, HELD + 1, HELD + 2, HELD + 3, HELD + 4])
def test_scripts_end_while_a_replica_comes_back(start, steps):
    result = start(stage=1, kills=[[0, 7, "backward"]], held=[HELD], steps=steps, saves=[steps])
    ended_well(result)
    assert {2, 3} <= result.records.keys()


@pytest.mark.parametrize("rank", [0, 2])
def test_what_ranks_agree_on_before_the_first_step_is_what_their_predecessors_did(start, rank):
    result = start(stage=1, kills=[[rank, 7, "backward"]], held=[HELD], steps=LONG, meets=True)
    ended_well(result)
    assert sorted(event["rank"] for event in result.of("rejoined")) == [rank, rank + 1]
    first, *others = [each["met"] for each in result.records.values()]
    assert len(others) == RANKS - 1 and all(other == first for other in others)
    assert first[3:] == [sum(range(RANKS + 1)), 0.0]


@pytest.mark.parametrize(
    "rates, stage", [("script", 1), ("functions", 1), ("script", 3), ("behind", 0), ("behind", 1), ("relative", 1)]
)
def test_a_replica_comes_back_whoever_sets_learning_rates(start, rates, stage):
    kills, checked = [[2, 7, "backward"]], {"check_replicas": 1}
    result = start(stage=stage, kills=kills, held=[HELD], steps=LONG, rates=rates, recycle=checked)
    ended_well(result)
    assert sorted(event["rank"] for event in result.of("rejoined")) == [2, 3]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_masters_that_scripts_write_behind_a_step_are_in_no_forward_before_the_next(start, stage):
    """As with stock: model weights are made of masters in the optimizer's step, and not before."""
    more = {"stage": stage, "rates": "masters", "steps": LONG}
    result = start(kills=[[2, 7, "backward"]], held=[HELD], recycle={"check_replicas": 1}, **more)
    ended_well(result)
    assert sorted(event["rank"] for event in result.of("rejoined")) == [2, 3]
    stock = start(replicas=0, ledger=ledger(result, RANKS), **more)
    assert stock.code == 0, stock.output[-6000:]
    for each in result.records.values():
        assert weights(each) == pytest.approx(weights(stock.records[0]), abs=ROUNDING["fp32"])


def test_what_scripts_have_changed_last_is_said_to_be_lost_with_the_last_source(start):
    """... which dies as the newcomers enter, before it has said what its script has set behind the last step."""
    more = {"stage": 1, "rates": "behind", "steps": LONG}
    result = start(kills=[[2, 7, "backward"]], held=[HELD], faults=["kill 0.0 at recovery.resume:3"], **more)
    assert result.code == 0, result.output[-6000:]
    warned = {event["rank"]: event["text"] for event in result.of("warning")}
    first = {rank: result.records[rank]["first"] for rank in (2, 3)}
    assert warned and {rank for rank in first if result.records[rank]["rate"] != 1e-2 / (first[rank] + 1)} <= {*warned}
    assert all("has no source left for what the other scripts" in text for text in warned.values()), warned


def test_training_goes_on_as_before_where_a_checkpoint_could_not_be_written(start, tmp_path):
    """At stage 3 stock puts weights into another form to write them."""
    result, calm = start(stage=3, saves=[4], refuse=True), start(stage=3)
    assert result.code == 0 and not (tmp_path / "run0" / "saved" / "latest").exists(), result.output[-6000:]
    assert {path.name for path in (tmp_path / "run0").glob("refused*")} == {f"refused{rank}" for rank in range(RANKS)}
    for rank, each in calm.records.items():
        assert weights(result.records[rank]) == weights(each)


WRONG = {
    "twice": "engine(…) was called twice: call engine.backward(loss)",
    "no backward": "engine.step() before engine.backward(loss): call that first",
    "no forward": "engine.backward(loss) without a forward: call engine(…)",
    "no step": "engine.step() was left out: call it after each engine.backward(loss)",
    "only step": "engine.step() without a micro-batch: call engine(…)",
    "no_sync": "engine.no_sync() with recycle.replicas",
    "save": "save_checkpoint() in the middle of a step",
}


@pytest.mark.parametrize("wrong", WRONG)
def test_calls_that_are_out_of_order_end_in_one_line(start, wrong):
    result = start(2, stage=0, wrong=wrong)
    assert result.code != 0 and WRONG[wrong] in result.of("end")[0]["text"], result.output[-6000:]


def test_two_replicas_come_back_together(start):
    """Three of two ranks each, at stage 3, where stock's own step leaves its optimizer without parameters."""
    kills = [[2, 7, "backward"], [4, 7, "forward"]]
    result = start(6, stage=3, replicas=3, kills=kills, held=[HELD], waits=4, steps=LONG)
    ended_well(result)
    assert sorted(event["rank"] for event in result.of("rejoined")) == [2, 3, 4, 5]


@pytest.mark.parametrize("stage", (1, 3))
def test_the_rank_that_is_late_in_a_slow_replica_is_named(start, stage):
    """Of what a layer asks the other ranks of its replica for at stage 3, these wait for it too."""
    lag = [2, 0.3, 100]
    found = start(stage=stage, steps=14, lag=lag)
    ended_well(found)
    named = found.of("slow_replica")[0]
    assert (named["replica"], named["rank"], named["over"]) == (1, 2, False), named
    assert named["behind_us"] > 200_000 and named["own_us"] > 200_000, named
    assert not found.of("lost")
    ledger(found, RANKS)
