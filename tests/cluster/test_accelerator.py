"""Jobs on the stand-in accelerator (tests/support/standin), which raises what GPUs show as rare wrong numbers.

Its kernels are the CPU's, so the losses are those of the CPU's job; asynchronous copies are late by a seed.
"""

from __future__ import annotations

import pytest

from tests.cluster.test_kills import CLIPPED, FUSED, struck
from tests.support.jobs import PLAIN, STANDIN, assert_same_training, faults


@pytest.fixture
def vehicle():
    return STANDIN


@pytest.fixture
def on_cpu(request, references):
    """``on_cpu(*overrides)``: the result of the job without a failure on the CPU."""
    return lambda *more, **shape: references(request.getfixturevalue("plain_server"), PLAIN, *more, **shape)


FEATURES = {
    "split backward": ((), "kill 0.1 before 1W0.1@5"),
    "a forward": ((), "kill 1.0 after 0F1.1@5"),
    "a sum": ((), "kill 1.1 before 1REDUCE@5"),
    "a step": ((), "kill 0.0 before 0STEP@5"),
    "fused backward": ((FUSED,), "kill 0.1 before 1B0.1@5"),
    "clipping": ((CLIPPED,), "kill 1.0 after 0VALIDATE@5"),
    "inverse undo": (("recycle.undo=inverse",), "kill 0.1 before 1REDUCE@5"),
    "nothing kept": (("recycle.keep_bytes=1",), "kill 0.1 before 1W0.1@6"),
    "exact": (("recycle.exact=true",), "kill 0.1 before 1I0.1@5"),
    "no staggering": (("recycle.stagger_optimizer=false",), "kill 0.0 after 0I0.1@5"),
    "momentum": (("optimizer=sgd",), "kill 1.1 before 1F1.0@5"),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_a_kill_with_each_feature(launch, on_cpu, feature):
    from tests.support.jobs import SQUARE

    settings, kill = FEATURES[feature]
    result = launch(faults(kill), *settings, RECYCLE_TEST_STANDIN_LATE="7").finish()
    assert_same_training(result, on_cpu(SQUARE, *settings), {kill.split()[1]})
    assert struck(result) == {kill}
    assert "never raised" not in result.output, result.output[-6000:]


def test_nothing_waits_for_the_device_but_what_is_listed(launch):
    result = launch(CLIPPED).finish()
    print({rank: record["synchronisations"] for rank, record in result.records.items()})
    result2 = launch("recycle.exact=true").finish()
    print({rank: record["synchronisations"] for rank, record in result2.records.items()})
    assert 0
