"""Jobs on the stand-in accelerator whose sums and boundary tensors go over the false NCCL
(tests/support/standin/nccl.py).

A survivor waits in a kernel for the dead, until an abort ends it with garbage.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.mistakes.nccl import IN_SUMS
from tests.support import standin_build
from tests.support.cluster import Run
from tests.support.jobs import (
    ALONE,
    CHECKPOINT,
    DEEPSPEED,
    LATE,
    LOG,
    LOSS_TOLERANCE,
    PLAIN,
    SQUARE,
    STANDIN,
    STEPS,
    WRAPPED,
    Shape,
    assert_in_order,
    assert_same_training,
    difference,
    faults,
    on_deepspeed,
)
from tests.support.kills import (
    CLIPPED,
    FIRST,
    SECOND,
    THREE,
    Kill,
    kill_all,
    matrix,
    named,
    schedules,
    struck,
)
from tests.support.launching import launching
from tests.support.returns import LONG, assert_came_back, comes_back

OVER = "recycle.device_link=nccl"
TENSORS = "broadcast"  # NCCL's operation that carries boundary tensors
KILLS = {
    "before its sum": "kill 1.1 before 1REDUCE@5",
    "behind its sum": "kill 1.1 after 1REDUCE@5",
    "before its step": "kill 2.0 before 0STEP@5",
    "in a forward": "kill 0.0 before 0F0.1@5",
    "in a backward": "kill 2.1 before 1W2.0@6",
    "before it sends": "kill 0.0 before 0SA0.1>0.1@5",
    "behind its send": "kill 2.1 after 1SG2.0>2.0@5",
    "before it receives": "kill 1.1 before 1RA1.1<1.0@6",
}


@pytest.fixture
def vehicle():
    if not standin_build.can_be_built():
        pytest.skip("no C++ compiler here, for the stand-in accelerator")
    standin_build.built()
    return STANDIN


@pytest.fixture
def on_the_host(request, references):
    return lambda *more, shape=THREE: references(request.getfixturevalue("plain_server"), PLAIN, shape, *more)


@pytest.fixture
def start(launch, tmp_path):
    """``start(*overrides, also=[], over={})``: a job over NCCL, which is as ``over`` says, changed by more wrappers."""

    def start(
        *more: str,
        also: tuple[dict, ...] = (),
        over: Mapping[str, object] = {},
        shape: Shape = THREE,
        **options: str,
    ):
        wraps = [{"name": "over_false_nccl", "folder": str(tmp_path), **over}, *also]
        wrapped = {"script": WRAPPED, "RECYCLE_TEST_WRAP": json.dumps(wraps)}
        return launch(OVER, *more, shape=shape, **wrapped, **LATE, **options).finish()

    return start


def counts(folder: Path, lost: str, *names: str) -> list[int]:
    """How many kernels of NCCL's each worker that was there all the time has seen through, by each name or in all."""
    found = [json.loads(path.read_text()) for path in folder.glob("*.json") if path.stem != lost]
    return [one.get(name, 0) for one in found for name in names] if names else [sum(one.values()) for one in found]


def assert_over_nccl(folder: Path, lost: str) -> None:
    """Of each of these workers sums and boundary tensors have gone over NCCL."""
    assert min(counts(folder, lost, "allreduce", TENSORS)) > 0


@pytest.mark.parametrize("kill", KILLS)
def test_a_kill(start, on_the_host, tmp_path, kill):
    result = start(faults(KILLS[kill]))
    assert_same_training(result, on_the_host(), {KILLS[kill].split()[1]})
    assert struck(result) == {KILLS[kill]}
    assert_in_order(result)
    assert_over_nccl(tmp_path, KILLS[kill].split()[1])


@pytest.mark.parametrize("setting", ["recycle.exact=true", CLIPPED])
def test_a_kill_with(start, on_the_host, tmp_path, setting):
    """Exact sums are added in their own order, on the host."""
    result = start(faults(KILLS["before its sum"]), setting)
    assert_same_training(result, on_the_host(setting), {"1.1"})
    assert_in_order(result)
    exact = "exact" in setting
    assert all((count == 0) == exact for count in counts(tmp_path, "1.1"))


@pytest.fixture
def stuck(tmp_path) -> dict:
    """1.1 dies in a sum in which the others of its stage are stuck."""
    dies = {"seat": "1.1", "step": 5, "others": ["0.1", "2.1"]}
    return {"name": "die_beside_stuck_sums", "folder": str(tmp_path), **dies}


def test_garbage_of_an_abort_is_in_no_weight(start, on_the_host, stuck):
    """The thread that trains hears of the loss only when the sum's event has happened."""
    assert_same_training(start(also=(stuck,)), on_the_host(), {"1.1"})


@pytest.mark.parametrize("mistake", ["", *IN_SUMS])
def test_garbage_of_another_members_abort_is_in_no_weight_and_would_be_seen(start, on_the_host, stuck, mistake):
    """It ends the sum of a member that has not heard of the loss yet."""
    result = start(over={"mistake": mistake}, also=(stuck | {"last": "2.1"},))
    if not mistake:
        assert_same_training(result, on_the_host(), {"1.1"})
        return
    assert result.code != 0 or not difference(result, on_the_host()).tolerated


def test_a_worker_whose_abort_does_not_end_gives_itself_up(start, on_the_host, tmp_path, stuck):
    never = {"name": "never_abort", "folder": str(tmp_path), "seat": "0.1"}
    result = start("recycle.rejoin=never", also=(stuck, never))
    assert_same_training(result, on_the_host(), {"0.1", "1.1"})
    assert any("NCCL" in event["text"] and "ranks" in event["text"] for event in result.of("error"))


def test_who_comes_back_adds_up_over_nccl_too(launch, on_the_host, tmp_path):
    """The others leave their groups for ones that it is in."""
    over, seat = {"name": "over_false_nccl", "folder": str(tmp_path)}, "1.1"
    kill = "kill 1.1 before 1REDUCE@5"
    result = comes_back(
        lambda *more, **job: launch(*more, **job, **LATE), tmp_path, kill, OVER, shape=THREE, wraps=(over,)
    )
    result = result.finish()
    assert_came_back(result, on_the_host(f"steps={LONG}"), seat)
    assert_in_order(result)
    assert_over_nccl(tmp_path, "")


@pytest.mark.parametrize(
    "kill", ["kill 0.1 at recovery.resume:2", "kill 2.0 at recovery.report:2", "kill 0.0 before 0SA0.1>0.1@14"]
)
def test_another_is_lost_as_one_comes_back(launch, on_the_host, tmp_path, kill):
    """Links of the membership that lets it in are left as they are made."""
    over, first = {"name": "over_false_nccl", "folder": str(tmp_path)}, "kill 1.1 before 1REDUCE@5"
    late = lambda *more, **job: launch(*more, **job, **LATE)
    result = comes_back(late, tmp_path, first, OVER, shape=THREE, wraps=(over,), later=(kill,)).finish()
    assert result.code == 0, result.output[-6000:]
    assert {event["seat"] for event in result.of("lost")} == {"1.1", kill.split()[1]}
    assert difference(result, on_the_host(f"steps={LONG}")).tolerated
    assert_in_order(result)


DEEPSPEEDS = {
    "a kill": ("", ("kill 0.1 before 1REDUCE@5",)),
    "tied weights, and another loss in the recovery": (
        "model.tied=true",
        ("kill 0.1 before 1TIE@7", "kill 1.0 at recovery.resume:2"),
    ),
}


@pytest.mark.parametrize("job, kills", DEEPSPEEDS.values(), ids=DEEPSPEEDS)
def test_deepspeed_survives(server, tmp_path, references, job, kills):
    """Whose optimizer has buckets of its own."""
    counted, more = {"name": "over_false_nccl", "folder": str(tmp_path)}, [job] if job else []
    with launching(server, tmp_path, Run, DEEPSPEED) as launch:
        result = launch(faults(*kills), OVER, *more, script=WRAPPED, **on_deepspeed(counted), **LATE).finish()
    lost = {kill.split()[1] for kill in kills}
    assert_same_training(result, references(server, DEEPSPEED, SQUARE, *more), lost)
    assert_in_order(result)
    for seat in lost:
        (tmp_path / f"{seat}.json").unlink(missing_ok=True)
    assert_over_nccl(tmp_path, "")


# --- boundary tensors --------------------------------------------------------------------------------


@pytest.mark.some_of(2)
@pytest.mark.parametrize("first, second", [pytest.param(*pair, id=f"{pair[0]}, {pair[1]}") for pair in matrix()])
def test_each_rank_at_named_instructions(start, on_the_host, tmp_path, first: Kill, second: Kill):
    result = start(faults(first.at(FIRST), second.at(SECOND)), "recycle.rejoin=never", shape=SQUARE)
    assert_same_training(result, on_the_host(shape=SQUARE), {first.seat, second.seat})
    assert struck(result) == {first.at(FIRST), second.at(SECOND)}
    assert_in_order(result)
    survivors = [path for path in tmp_path.glob("*.json") if path.stem not in (first.seat, second.seat)]
    assert min(json.loads(path.read_text())[TENSORS] for path in survivors) > 0


def moved(result) -> dict[str, tuple[int, int]]:
    """How many boundary tensors each worker has sent over NCCL, and through the host."""
    return {event["seat"]: (event["by_link"], event["by_host"]) for event in result.of("moved")}


@pytest.mark.parametrize("at, seat", [("the sender", "0.0"), ("the receiver", "0.1")])
def test_a_launch_that_fails_costs_nobody_anything(start, on_the_host, at, seat):
    """What would go over that link goes by the host from then on."""
    result = start(also=({"name": "fail_a_launch", "seat": seat, "step": 5, "at": at},))
    assert_same_training(result, on_the_host())
    assert_in_order(result)
    assert len(result.of("resume")) == 1, "nobody meets anew"
    found = moved(result)
    assert found["0.0"][1] >= 2 * (STEPS - 4) > found["1.0"][1] and min(by_link for by_link, _ in found.values()) > 0


def test_what_is_begun_after_a_change_of_the_membership_is_sent_again(start, on_the_host, tmp_path):
    """Its sender is stuck in its half when another worker dies."""
    late = {"name": "receive_late", "folder": str(tmp_path), "seat": "0.1", "step": 5}
    gate = {"name": "gate", "folder": str(tmp_path), "before": "1F1.0@5", "until": "", "by": ["announced"]}
    result = start(faults("kill 1.1 after 1F1.0@5"), also=(late, gate))
    assert_same_training(result, on_the_host(), {"1.1"})
    assert_in_order(result)
    assert_over_nccl(tmp_path, "1.1")


def test_a_stopped_worker_is_given_up(start, on_the_host, tmp_path):
    """Its peers are stuck in what they send to it."""
    result = start("recycle.progress_timeout_s=2", faults("stop 0.1 before 1F0.1@6"))
    assert_same_training(result, on_the_host(), {"0.1"})
    assert_in_order(result)
    assert_over_nccl(tmp_path, "0.1")


def test_a_planned_leave(start, on_the_host, tmp_path):
    result = start(faults("leave 0.1 before 1F0.1@6"))
    assert_same_training(result, on_the_host(), left={"0.1"})
    assert_in_order(result)
    assert len(result.of("resume")) == 2 and not result.of("recovery_plan")
    assert_over_nccl(tmp_path, "0.1")


def test_whoever_dies_in_an_evaluation_the_mean_is_the_same(launch, tmp_path):
    plan, wraps = {"evaluate_at": 5, "times": 4}, [{"name": "over_false_nccl", "folder": str(tmp_path)}]
    kills = faults("kill 0.0 before 0F0.1@-2", "kill 1.1 after 1RA1.0<1.0@-3")
    jobs = {"RECYCLE_TEST_CHECKPOINT": json.dumps(plan), "RECYCLE_TEST_WRAP": json.dumps(wraps)}
    result = launch("steps=7", OVER, kills, shape=SQUARE, script=CHECKPOINT, **jobs, **LATE).finish()
    assert result.code == 0 and len(result.of("lost")) == 2, result.output[-6000:]
    (evaluated,) = {tuple(record["evaluated"]) for record in result.records.values()}
    assert evaluated == pytest.approx([evaluated[0]] * 4, abs=LOSS_TOLERANCE)
    assert_in_order(result)


def test_nothing_kept_for_peers(start, on_the_host):
    """What is let go of is still on its way, and is made again where it was lost."""
    result = start("recycle.keep_bytes=1", faults("kill 0.1 before 1W0.1@6"))
    assert_same_training(result, on_the_host(), {"0.1"})
    assert_in_order(result)


def test_a_stage_without_a_worker_is_replayed_from_what_was_logged_of_tensors_on_the_device(start, on_the_host):
    result = start(*LOG, faults("kill 0.1 before 1F0.0@6"), shape=ALONE)
    assert result.code == 0 and len(result.of("replayed")) == 1, result.output[-6000:]
    assert difference(result, on_the_host(*LOG, shape=ALONE)).tolerated
    assert_in_order(result)
    assert min(by_link for by_link, _ in moved(result).values()) > 0


# --- links in the making -----------------------------------------------------------------------------

MOMENTS = (
    *("before its word", "behind its word", "before its first use", "in its first use"),
    *("before its announcement", "behind its announcement", "behind its half"),
)


@pytest.mark.some_of(3)
@pytest.mark.parametrize("at", MOMENTS)
@pytest.mark.parametrize("seat", ["0.0", "1.1"])
def test_a_worker_dies_as_links_are_made(start, on_the_host, tmp_path, at, seat):
    """Most often those that are made after the loss of another worker, so that there are new neighbours."""
    dies = {"name": "die_in_the_making", "seat": seat, "at": at, "generation": 1}
    result = start(faults("kill 2.0 after 0F2.0@5"), "recycle.rejoin=never", also=(dies,))
    assert_same_training(result, on_the_host(), {"2.0", seat})
    assert_in_order(result)
    assert_over_nccl(tmp_path, seat)


# --- what hardware may do ----------------------------------------------------------------------------

HARDWARE = {
    "few queues": {"connections": 2, "stuck_s": 1},
    "one queue": {"connections": 1, "stuck_s": 1},
    "as many queues as there are": {"connections": 32},
    "kernels are loaded late": {"lazy": True},
    "short queues": {"launches": 2},
}


@pytest.mark.some_of(3)
@pytest.mark.parametrize("kill", ["nobody", *KILLS])
@pytest.mark.parametrize("what", HARDWARE)
def test_a_kill_where(start, on_the_host, what, kill):
    kills = [KILLS[kill]] if kill in KILLS else []
    slow = {"name": "receive_slowly", "seat": "0.1", "each_s": 0.01}
    result = start(faults(*kills), over=HARDWARE[what], also=(slow,))
    assert_same_training(result, on_the_host(), {kill.split()[1] for kill in kills})
    assert_in_order(result)


@pytest.mark.parametrize("ends", [("0.0", "0.1"), ("0.0", "0.0", "0.1", "0.1")])
def test_both_ends_fail_at_once(start, on_the_host, ends):
    failing = [
        {"name": "fail_a_launch", "seat": seat, "step": 5, "at": at}
        for seat, at in zip(ends, ("the sender", "the receiver") * 2)
    ]
    result = start(also=tuple(failing))
    assert_same_training(result, on_the_host())
    assert_in_order(result)


@pytest.mark.some_of(2)
@pytest.mark.parametrize("kills", [pytest.param(kills, id=named(kills)) for kills in schedules()])
def test_kills_from_outside(launch, on_the_host, tmp_path, kills):
    over = {"name": "over_false_nccl", "folder": str(tmp_path)}
    result = kill_all(lambda *more, **job: launch(OVER, *more, **job, **LATE), tmp_path / "gate", kills, others=(over,))
    assert_same_training(result, on_the_host(shape=SQUARE), {seat for _, seats in kills for seat in seats})
    assert_in_order(result)
