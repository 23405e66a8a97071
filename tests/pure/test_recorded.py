"""What the coordinator keeps of steps and evaluations for the scripts of newcomers."""

from __future__ import annotations

import json
from math import inf, isnan, nan

from hypothesis import given
from hypothesis import strategies as st

from recycle_plugin.core.coordinator.facts.output import LAST_STAGE, WORKERS
from recycle_plugin.core.coordinator.facts.recorded import PIECE, Recorder
from recycle_plugin.core.coordinator.state_dump import dump, load
from recycle_plugin.core.messages.encoding import decode, encode
from recycle_plugin.core.messages.from_coordinator import Collected, Recorded
from recycle_plugin.core.messages.from_workers import BarrierReached, Contribution, SurvivorReport
from recycle_plugin.core.vocabulary.barrier import Barrier, Meets
from recycle_plugin.core.worker.control_view import ControlView
from tests.support.membership import holds, started, step

EVALUATED = Barrier(Meets.EVALUATED, number=1)


def heard(messages: list[Recorded]) -> tuple[dict[int, float], dict[int, float]]:
    losses = {one.step + place: loss for one in messages for place, loss in enumerate(one.losses)}
    return losses, {one.evaluation + place: mean for one in messages for place, mean in enumerate(one.evaluations)}


def lose(membership, number: int, *losses: float) -> None:
    for place, loss in enumerate(losses):
        membership.receive(Contribution(2 + place, number, "loss", {f"{place}.0": loss}, len(losses)), 0.0)


def test_it_is_what_all_were_told_up_to_the_last_committed_step():
    """Of step 3 the losses are there before it is committed; a worker hears the same mean that the others have."""
    membership = started()
    for number in (1, 2, 3):
        lose(membership, number, number + 0.25, number + 0.5)
        if number < 3:
            step(membership, 0, number)
    for rank in range(4):
        values = {f"{rank}.0": rank + 0.5} if rank > 1 else {}
        membership.receive(BarrierReached(rank, 0, EVALUATED, values), 0.0)
    (told,) = membership.state.steps.recorded.told(membership.committed)
    assert told == Recorded(1, (1.375, 2.375), 1, (3.0,), 2)
    assert list(membership.state.steps.recorded.told(2, 1, 1)) == [Recorded(2, (2.375,), 2, (), 2)]
    assert list(membership.state.steps.recorded.told(2, 2, 1)) == [Recorded(3, (), 2, (), 2)]
    view = ControlView(2, 1)
    view.take(told)
    assert view.recorded == [told]


def test_what_is_logged_beside_a_loss_goes_to_the_last_stage_and_the_mean_of_the_losses_is_kept():
    membership, logged = started(), {"lm loss": (3.0, 2.0), "other": (7.5,)}
    membership.receive(Contribution(2, 1, "loss", {"0.0": (1.5, logged)}, 2), 0.0)
    last = decode(encode(Contribution(3, 1, "loss", {"1.0": (2.5, logged)}, 2)))
    each, mean = {"0.0": (1.5, logged), "1.0": (2.5, logged)}, {"mean": 2.0}
    told = [(whom, one.values) for whom, one in membership.receive(last, 0.0).messages if isinstance(one, Collected)]
    assert told == [(LAST_STAGE, each), (WORKERS, mean)]
    for rank in range(4):
        brings = BarrierReached(rank, 0, EVALUATED, {"0.0": [4.0, logged]} if rank == 3 else {})
        membership.receive(decode(encode(brings)), 0.0)
    step(membership, 0, 1)
    assert list(membership.state.steps.recorded.told(1)) == [Recorded(1, (2.0,), 1, (4.0,), 1)]


def test_a_checkpoint_that_is_loaded_while_they_train_is_said():
    membership = started()
    step(membership, 0, 1)
    for rank in range(4):
        membership.receive(BarrierReached(rank, 0, Barrier(Meets.LOADED), {}), 0.0)
    assert [one.refused for one in membership.state.steps.recorded.told(1)] == [""]
    assert membership.generation == 1
    for rank in range(4):
        membership.receive(SurvivorReport(rank, 1, 0, "plan", holds(rank), loaded=True), 0.0)
    (told,) = membership.state.steps.recorded.told(1)
    assert "the others loaded a checkpoint during training" in told.refused and "(of step 0)" in told.refused


def test_what_is_run_anew_is_replaced_and_a_gap_is_named():
    recorder = Recorder(10)
    recorder.lost(12, {"0.0": 2.0})
    assert next(recorder.told(12)).unknown == (11,)
    recorder.lost(11, {"0.0": 7.0})
    recorder.lost(11, {"0.0": 1.0, "1.0": 2.0})
    recorder.lost(13, {})
    assert list(recorder.told(13)) == [Recorded(11, (1.5, 2.0), 1, (), 13)]
    assert list(recorder.told(9)) == [Recorded(11, (), 1, (), 9)]


@given(st.integers(0, 3), st.integers(0, 2 * PIECE + 3), st.integers(0, PIECE + 2), st.data())
def test_pieces_come_together(began, steps, evaluations, data):
    recorder = Recorder(began)
    for number in range(1, steps + 1):
        recorder.lost(began + number, {"x": float(number)})
    for number in range(1, evaluations + 1):
        recorder.evaluated(number, {"x": -float(number)})
    committed = began + data.draw(st.integers(0, steps))
    known, seen = data.draw(st.integers(0, committed)), data.draw(st.integers(0, evaluations))
    told = list(recorder.told(committed, known, seen))
    losses, means = heard(told)
    assert losses == {one: float(one - began) for one in range(max(known, began) + 1, committed + 1)}
    assert means == {one: -float(one) for one in range(seen + 1, evaluations + 1)}
    kinds = [kind for one in told for kind, some in (("means", one.evaluations), ("steps", one.losses)) if some]
    assert kinds == sorted(kinds)
    assert all(len(one.losses) + len(one.evaluations) <= PIECE for one in told)
    assert all(decode(encode(one)) == one for one in told)


def test_it_is_small_and_survives_being_written_down():
    """8 bytes a number; also those that JSON has no words for."""
    recorder = Recorder()
    for number in range(1, 10_001):
        recorder.lost(number, {"0.0": 0.1 * number})
    assert recorder._losses.itemsize == 8 and recorder._losses.buffer_info()[1] == 10_000
    odd = Recorder()
    for number, loss in enumerate((nan, inf, 1.5), 1):
        odd.lost(number, {"0.0": loss})
    (told,) = load(json.loads(json.dumps(dump(odd), allow_nan=False))).told(3)
    assert isnan(told.losses[0]) and told.losses[1:] == (inf, 1.5)
