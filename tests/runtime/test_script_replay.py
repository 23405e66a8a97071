"""What a newcomer's script is given of steps and evaluations that are over, and what it does when it is let in."""

from __future__ import annotations

import pytest
import torch

from recycle_plugin.core.messages.from_coordinator import Recorded
from recycle_plugin.errors import RecycleError, WaitTimeout
from recycle_plugin.runtime.worker.newcomer import NewcomersScript, ScriptReplay
from recycle_plugin.runtime.worker.on_join import OnJoin


class Counted:
    """An optimizer that has begun at a checkpoint of step 3."""

    def __init__(self) -> None:
        self.steps = 3

    def pass_over(self) -> None:
        self.steps += 1

    def get(self) -> int:
        return self.steps

    def put(self, steps: int) -> None:
        self.steps = steps


# --- steps and evaluations ----------------------------------------------------------------------------


def test_each_step_and_evaluation_is_given_once_in_its_order():
    replay = ScriptReplay()
    replay.hear(Recorded(1, (0.5, 0.25), 1, (7.0,), 2))
    assert [replay.loss(), replay.evaluation(), replay.loss(), replay.loss(), replay.evaluation()] == [
        0.5,
        7.0,
        0.25,
        None,
        None,
    ]
    assert (replay.position, replay.evaluated) == (2, 1)
    replay.hear(Recorded(3, (float("nan"),), 2, (8.0,), 3))
    assert (loss := replay.loss()) != loss and replay.evaluation() == 8.0
    assert (replay.position, replay.evaluated) == (3, 2)


def test_evaluations_and_ends_of_data_that_are_over_are_no_steps():
    replay = ScriptReplay()
    replay.hear(Recorded(1, (0.5, 0.25, 0.125), 1, (7.0,), 3, unfilled=(2,)))
    found = [replay.only_steps, replay.evaluation(), replay.only_steps, replay.loss(), replay.loss(), replay.only_steps]
    assert found == [False, 7.0, False, 0.5, 0.25, True]


def test_a_piece_may_come_twice_and_another_is_added():
    replay = ScriptReplay(4)
    for _ in range(2):
        replay.hear(Recorded(5, (1.0, 2.0), 1, (), 6))
    replay.hear(Recorded(7, (3.0,), 1, (9.0,), 7))
    assert [replay.loss() for _ in range(4)] == [1.0, 2.0, 3.0, None] and replay.evaluation() == 9.0


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (Recorded(3, (1.0,), 1, (), 3), "comes to step 1, of which the others have no loss"),
        (Recorded(1, (0.0, 1.0), 1, (), 2, unknown=(1,)), "comes to step 1, of which the others have no loss"),
        (Recorded(1, (), 1, (), 2, refused="they have loaded"), "they have loaded: step 1 can't be repeated"),
    ],
)
def test_a_loss_that_nobody_has_is_not_made_up(message, said):
    replay = ScriptReplay()
    replay.hear(message)
    with pytest.raises(RecycleError, match=said):
        replay.loss()


def test_the_way_ends_where_this_worker_is_a_member(coordinator):
    """It asks once, counts what it goes through, and waits with a deadline that names what for."""
    session, counted, asked = coordinator.session(0, wait_timeout_s=0.2), Counted(), []
    newcomer = NewcomersScript(session, counted, counted, lambda: asked.append(counted.steps), lambda step: step < 7)
    coordinator.tell(Recorded(4, (0.5, 0.25), 1, (), 5))
    coordinator.tell(Recorded(6, (), 1, (7.0,), 5))
    with session.waiting.changed:
        assert session.waiting.changed.wait_for(lambda: len(session.view.recorded) == 2, 10)
    assert [newcomer.loss(), newcomer.evaluation(), newcomer.loss(), newcomer.evaluated] == [0.5, 7.0, 0.25, 1]
    assert counted.steps == 5
    with pytest.raises(WaitTimeout, match="waited 0 s for the loss of step 6, which the others know"):
        newcomer.loss()
    with pytest.raises(WaitTimeout, match="for the mean of evaluation 2, which the others know"):
        newcomer.evaluation()
    coordinator.tell(Recorded(6, (0.125,), 1, (), 6))
    assert newcomer.loss() == 0.125 and newcomer.loss() is None and counted.steps == 6
    assert asked == [3]


def test_a_script_counts_its_own_steps_where_the_state_is_further(coordinator):
    """The state may come as it is some steps on, or have followed several at once."""
    session, counted, followed = coordinator.session(0), Counted(), []

    def follow(step: int) -> bool:
        followed.append(step)
        counted.steps = max(counted.steps, 6)
        return step < 8

    newcomer = NewcomersScript(session, counted, counted, lambda: None, follow)
    coordinator.tell(Recorded(4, (0.5, 0.25, 0.125, 0.0625), 1, (), 7))
    found = [(newcomer.loss(), counted.steps) for _ in range(5)]
    assert found == [(0.5, 4), (0.25, 5), (0.125, 6), (0.0625, 7), (None, 7)]
    assert followed == [4, 7, 8], "more was followed while the script was behind"


# --- on_join ------------------------------------------------------------------------------------------


def test_what_one_script_gives_the_other_gets_in_the_order_of_the_calls():
    got, peer, mine = [], OnJoin(), OnJoin()
    for each in (peer, mine):
        each.add(lambda step, state: got.append(("average", step, state)), lambda: {"weight": torch.ones(2)})
        each.add(lambda step, state: got.append(("counter", step, state)), None)
    mine.joined(12, peer.state())
    (_, step, average), counter = got
    assert step == 12 and average["weight"].tolist() == [1.0, 1.0] and counter == ("counter", 12, None)


def test_a_mistake_of_a_peers_function_is_not_the_peers_end():
    peer, mine = OnJoin(), OnJoin()
    mine.add(lambda step, state: pytest.fail("called"), dict)
    for wrong in (lambda: 1 / 0, lambda: (lambda: 0)):
        peer.__init__()
        peer.add(print, wrong)
        with pytest.raises(RecycleError, match="on_join: a peer's state= has failed.*(division by zero|pickle)"):
            mine.joined(1, peer.state())


def test_scripts_that_differ_are_told_so():
    peer, mine = OnJoin(), OnJoin()
    mine.add(print, dict)
    with pytest.raises(RecycleError, match="on_join was called 1 times here, and 0 times at a peer"):
        mine.joined(1, peer.state())
    with pytest.raises(RecycleError, match="on_join: a peer's state= has failed.*nothing has come"):
        mine.joined(1, b"")
    OnJoin().joined(1, b"")
    got, alone = [], OnJoin()
    alone.add(lambda *given: got.append(given), None)
    alone.joined(3, b"")  # from nobody
    assert got == [(3, None)]
    for callback, state in ((None, None), (print, 3)):
        with pytest.raises(
            RecycleError, match=r"on_join: (None|3) can't be called; give a function of \(step, state\)"
        ):
            mine.add(callback, state)
