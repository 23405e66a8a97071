"""Jobs on the stand-in accelerator (tests/support/standin), which raises what GPUs show as rare wrong numbers.

Its kernels are the CPU's, so the losses are those of the CPU's job.  Copies that go on by themselves come about late,
at moments that a seed chooses.
"""

from __future__ import annotations

import pytest

from tests.cluster.test_kills import CLIPPED, FIRST, FUSED, SECOND, matrix, struck
from tests.support.jobs import PLAIN, SQUARE, STANDIN, STEPS, assert_same_training, faults

LATE = {"RECYCLE_TEST_STANDIN_LATE": "7"}  # a seed
EXACT = "recycle.exact=true"
FEATURES = {
    "split backward": ((), "kill 0.1 before 1W0.1@5"),
    "sums": ((), "kill 1.1 before 1REDUCE@5"),
    "a step that others have": ((), "kill 0.0 before 0STEP@5"),
    "fused backward": ((FUSED,), "kill 0.1 before 1B0.1@5"),
    "clipping": ((CLIPPED,), "kill 1.0 after 0VALIDATE@5"),
    "inverse undo": (("recycle.undo=inverse",), "kill 0.1 before 1REDUCE@5"),
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
    return lambda *more: references(request.getfixturevalue("plain_server"), PLAIN, SQUARE, *more)


def assert_in_order(result) -> None:
    """Nothing that the stand-in has found was lost, since nothing could be raised where it was found."""
    assert "never raised" not in result.output, result.output[-6000:]


@pytest.mark.parametrize("feature", FEATURES)
def test_a_kill_with_each_feature(launch, on_the_host, feature):
    settings, kill = FEATURES[feature]
    result = launch(faults(kill), *settings, **LATE).finish()
    assert_same_training(result, on_the_host(*settings), {kill.split()[1]})
    assert struck(result) == {kill}
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


INSTRUCTIONS, PEERS, LOSSES = "an instruction", "what goes to a peer, to the host", "a loss, to the host"
SUMS = {CLIPPED: {"all_reduce, to the host", "a norm, to the host"}, EXACT: {"a part of a sum, to the host"}}


@pytest.mark.parametrize("setting", SUMS)
def test_nothing_waits_for_the_device_but_what_is_listed(launch, setting):
    """Of all calls that stop a host until a device is done there is none; of the plugin's own waits, which have a
    deadline and a name, there is one behind each instruction, one for each number that leaves the device, and one for
    each copy that does.  And layers' own random numbers go on as if nothing was.
    """
    result = launch(setting).finish()
    for rank, found in result.records.items():
        assert found["synchronisations"] == [] and found["generators"]
        expected = {INSTRUCTIONS, PEERS} | SUMS[setting] | ({LOSSES} if result.stage_of(rank) == 1 else set())
        assert found["waits"].keys() == expected
        steps = STEPS - 2  # which are watched
        assert all(found["waits"][each] == steps for each in SUMS[setting])
        assert found["waits"][PEERS] == 2 * steps == found["waits"].get(LOSSES, 2 * steps)
