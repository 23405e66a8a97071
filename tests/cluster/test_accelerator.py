"""Jobs on the stand-in accelerator (tests/support/standin), which raises what GPUs show as rare wrong numbers.

Its kernels are the CPU's, so the losses are those of the CPU's job.  Copies that go on by themselves come about late,
at moments that a seed chooses.
"""

from __future__ import annotations

import json

import pytest

from tests.support.cluster import Run
from tests.support.jobs import (
    DEEPSPEED,
    LATE,
    PLAIN,
    SQUARE,
    STANDIN,
    STEPS,
    WRAPPED,
    assert_in_order,
    assert_same_training,
    faults,
    on_deepspeed,
)
from tests.support.kills import CLIPPED, FIRST, FUSED, SECOND, THREE, matrix, one_stage_ahead, replica_lost, struck
from tests.support.launching import launching

EXACT = "recycle.exact=true"
FEATURES = {
    "split backward": ((), "kill 0.1 before 1W0.1@5"),
    "sums": ((), "kill 1.1 before 1REDUCE@5"),
    "a step that others have": ((), "kill 0.0 before 0STEP@5"),
    "fused backward": ((FUSED,), "kill 0.1 before 1B0.1@5"),
    "clipping": ((CLIPPED,), "kill 1.0 after 0VALIDATE@5"),
    "nothing kept for peers": (("recycle.keep_bytes=1",), "kill 0.1 before 1W0.1@6"),
    "exact": ((EXACT,), "kill 0.1 before 1I0.1@5"),
    "one step behind the other": (("recycle.stagger_optimizer=false",), "kill 0.0 after 0I0.1@5"),
    "little pinned memory": (("recycle.pinned_bytes=1000", "optimizer=sgd"), "kill 1.1 before 1F1.0@5"),
}


@pytest.fixture
def vehicle():
    return STANDIN


@pytest.fixture
def on_the_host(request, references):
    """``on_the_host(*overrides)``: the result of the job without a failure on the CPU."""
    return lambda *more, shape=SQUARE: references(request.getfixturevalue("plain_server"), PLAIN, shape, *more)


@pytest.mark.some_of(3)
@pytest.mark.parametrize("feature", FEATURES)
def test_a_kill_with_each_feature(launch, on_the_host, feature):
    settings, kill = FEATURES[feature]
    result = launch(faults(kill), *settings, **LATE).finish()
    assert_same_training(result, on_the_host(*settings), {kill.split()[1]})
    assert struck(result) == {kill}
    assert any("recycle.pinned_bytes" in event["text"] for event in result.of("warning")) == ("pinned" in feature)
    assert_in_order(result)


@pytest.mark.parametrize("undo", ("host_snapshot", "inverse"))
def test_a_stage_that_has_stepped_takes_its_step_back(launch, on_the_host, tmp_path, undo):
    """What takes it back is in pinned memory, or the optimizer's rule turned round on the device."""
    kills, gate = faults(*replica_lost(1)), one_stage_ahead(tmp_path, 1, 7, 3)
    result = launch(kills, f"recycle.undo={undo}", shape=THREE, script=WRAPPED, **gate, **LATE).finish()
    assert_same_training(result, on_the_host(shape=THREE), {"0.0", "0.1"})
    assert {event["seat"] for event in result.of("recovery_plan") if event["undone"]} == {"1.1", "2.1"}
    assert_in_order(result)


@pytest.mark.parametrize("setting", (CLIPPED, EXACT))
def test_a_kill_within_a_sum_of_many_pieces(launch, on_the_host, setting):
    """Some pieces are over then, some are on their way to the host or back, and some have not begun."""
    wraps = json.dumps({"name": "small_pieces", "seat": "1.0", "step": 6, "after": 7})
    result = launch(setting, script=WRAPPED, RECYCLE_TEST_WRAP=wraps, **LATE).finish()
    assert_same_training(result, on_the_host(setting), {"1.0"})
    assert_in_order(result)


@pytest.mark.all_kills
@pytest.mark.parametrize("first, second", [pytest.param(*pair, id=f"{pair[0]}, {pair[1]}") for pair in matrix()])
def test_each_rank_at_named_instructions(launch, on_the_host, first, second):
    result = launch(faults(first.at(FIRST), second.at(SECOND)), **LATE).finish()
    assert_same_training(result, on_the_host(), {first.seat, second.seat})
    assert_in_order(result)


@pytest.mark.parametrize("undo", ("snapshot", "host_snapshot", "inverse"))
def test_steps_are_taken_back(launch, on_the_host, undo):
    """Those that turn out to be over the limit, with copies in host memory too, which are made while it computes."""
    settings = "optimizer=sgd", "gradient_clipping=0.55", "recycle.clip=validate", f"recycle.undo={undo}"
    result = launch(*settings, **LATE).finish()
    assert_same_training(result, on_the_host(*settings))
    assert 0 < len(result.of("rejected")) < STEPS
    assert_in_order(result)


def test_a_device_that_fails_costs_its_worker(launch, on_the_host):
    wraps = json.dumps({"name": "break_device", "rank": "2", "at": "1I0.1@6"})
    result = launch(script=WRAPPED, RECYCLE_TEST_WRAP=wraps).finish()
    assert_same_training(result, on_the_host(), {"0.1"})
    (said,) = result.of("error")
    assert "an illegal memory access" in said["text"]


WATCHED = {"name": "watch_device", "after": 2, "until": STEPS}  # the first steps look at what may be repeated
INSTRUCTIONS, PEERS, LOSSES = "an instruction", "what goes to a peer, to the host", "a loss, to the host"
SUMS = {
    CLIPPED: {"all_reduce, to the host", "a norm, to the host"},
    EXACT: {"a part of a sum, to the host"},
    "recycle.undo=host_snapshot": {"all_reduce, to the host", "what takes a step back, to the host"},
}


def watched(folder) -> dict[str, dict]:
    found = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    assert len(found) == SQUARE.ranks
    return found


@pytest.mark.parametrize("setting", SUMS)
def test_nothing_waits_for_the_device_but_what_is_listed(launch, tmp_path, setting):
    """Of all calls that stop a host until a device is done there is none; of the plugin's own waits, which have a
    deadline and a name, there is one behind each instruction, one for each number that leaves the device, and one for
    each copy that does.  And layers' own random numbers go on as if nothing was.
    """
    wraps = json.dumps(WATCHED | {"folder": str(tmp_path)})
    assert launch(setting, script=WRAPPED, RECYCLE_TEST_WRAP=wraps).finish().code == 0
    steps = STEPS - WATCHED["after"]
    for seat, found in watched(tmp_path).items():
        assert found["synchronisations"] == [] and found["generators"]
        expected = {INSTRUCTIONS, PEERS} | SUMS[setting] | ({LOSSES} if seat.endswith(".1") else set())
        assert found["waits"].keys() == expected
        assert all(found["waits"][each] == steps for each in SUMS[setting])
        assert found["waits"][PEERS] == 2 * steps == found["waits"].get(LOSSES, 2 * steps)


def test_deepspeed_trains_on_it_and_survives_a_kill(server, tmp_path, references):
    """megatron-core's layers, under DeepSpeed's launcher."""
    kill = "kill 0.1 before 1W0.1@5"
    with launching(server, tmp_path, Run, DEEPSPEED) as launch:
        result = launch(faults(kill), script=WRAPPED, **on_deepspeed(), **LATE).finish()
    assert_same_training(result, references(server, DEEPSPEED, SQUARE), {"0.1"})
    assert_in_order(result)


def test_with_deepspeed_only_the_script_waits_for_the_device(server, tmp_path):
    """It reads the loss that train_batch has returned, once a step."""
    with launching(server, tmp_path, vehicle=DEEPSPEED) as launch:
        launch(script=WRAPPED, **on_deepspeed(WATCHED | {"folder": str(tmp_path)})).ended_well()
    steps = STEPS - WATCHED["after"]
    for found in watched(tmp_path).values():
        assert {kind for kind, *_ in found["synchronisations"]} == {"item"} and found["generators"]
        assert sum(count for *_, count in found["synchronisations"]) == steps
        assert found["waits"].keys() <= {INSTRUCTIONS, PEERS, LOSSES, "all_reduce, to the host"}
