"""The script's store, between processes of a job whose coordinator the test plays: what torch makes of it, and how its
waits end.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from recycle_plugin.core.coordinator.facts.key_values import MOST
from recycle_plugin.core.messages.encoding import LIMIT
from recycle_plugin.core.messages.encoding import MOST as ENTRIES
from recycle_plugin.core.messages.from_coordinator import End
from recycle_plugin.core.messages.from_workers import StoreCall
from recycle_plugin.core.messages.said import LONGEST
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.collectives.script_store import ScriptStore
from recycle_plugin.runtime.control.connections import connect
from recycle_plugin.runtime.control.session import Session
from tests.support.coordinator import PATIENCE_S, FakeCoordinator
from tests.support.members import LONG_S
from tests.support.scenario import Script, run
from tests.support.secret import SECRET, way


def summed(script: Script) -> Any:
    """Over torch's own group of Gloo, which connects all pairs through the store; then what a script says itself."""
    rank, store = script.rank, _get_default_store()
    group = dist.ProcessGroupGloo(dist.PrefixStore("own", store), rank, dist.get_world_size(), timedelta(seconds=60))
    total = script.value()
    group.allreduce([total]).wait()
    store.set(f"of {rank}", f"{rank}")
    found = [store.get(f"of {each}") for each in range(3)]
    count = store.add("come", 1)
    store.wait(["of 0", "of 2"], timedelta(seconds=60))
    one = store.compare_set("first", "", "some")
    return total.item(), found, count, one, store.check(["nothing"]), store.multi_get(["of 1", "of 2"])


def test_gloo_sums_over_it_and_a_script_finds_in_it_what_others_put_there():
    found = run(summed, 3)
    assert [each[0] for each in found] == [6.0] * 3
    assert [each[1] for each in found] == [[b"0", b"1", b"2"]] * 3
    assert sorted(each[2] for each in found) == [1, 2, 3]
    assert [each[3:] for each in found] == [(b"some", False, [b"1", b"2"])] * 3


def barrier_of_torchs(script: Script) -> Any:
    import os

    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    group = dist.new_group([0, 1, 2])
    total = script.value()
    dist.all_reduce(total, group=group)
    return total.item(), _get_default_store().num_keys() > 0


def test_torchs_own_barrier_at_the_start_of_a_group_counts_in_it():
    assert run(barrier_of_torchs, 3) == [(6.0, True)] * 3


@pytest.fixture
def alone():
    coordinator = FakeCoordinator()
    accepting = threading.Thread(target=coordinator.accept, daemon=True)
    accepting.start()
    session = Session(connect(way(coordinator.address), LONG_S), 0, SECRET, wait_timeout_s=LONG_S)
    accepting.join(PATIENCE_S)
    yield coordinator, session
    session.forked = True
    coordinator.close()
    session._control.close()
    session._listening.join(PATIENCE_S)


def test_a_wait_past_its_deadline_names_its_keys_and_is_forgotten(alone):
    coordinator, session = alone
    store = dist.PrefixStore("of a script", ScriptStore(session, timedelta(seconds=LONG_S)))
    with pytest.raises(dist.DistStoreError, match="of a script/nobody"):
        store.wait(["nobody"], timedelta(milliseconds=50))
    store.set("nobody", "any")
    assert [one.call for one in coordinator.hear(StoreCall)] == ["wait", "wait_no_more", "set"]
    assert not coordinator._store.waits


@pytest.mark.parametrize(
    "end, why",
    (
        pytest.param(lambda coordinator: coordinator.tell(End(0, "test", True)), "ended", id="the job's end"),
        pytest.param(lambda coordinator: coordinator.close(), "", id="a dead coordinator"),
    ),
)
def test_an_end_ends_a_wait(alone, end, why):
    coordinator, session = alone
    found: list[BaseException] = []

    def wait() -> None:
        try:
            ScriptStore(session, timedelta(seconds=LONG_S)).get("nobody")
        except dist.DistStoreError as error:
            found.append(error)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    coordinator.hear(StoreCall)
    end(coordinator)
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive() and "nobody" in str(found[0]) and why in str(found[0])


def test_what_the_coordinator_refuses_is_an_error_that_says_why(alone):
    _, session = alone
    store = ScriptStore(session, timedelta(seconds=LONG_S))
    store.set("word", "no number")
    with pytest.raises(RecycleError, match="word"):
        store.add("word", 1)


@pytest.mark.parametrize("size", (MOST + 1, LONGEST - 100, LONGEST, LIMIT, LIMIT + 100))
def test_a_value_that_is_too_large_is_refused_and_the_store_goes_on(alone, size):
    """By the coordinator, or here if no message carries it."""
    _, session = alone
    store = ScriptStore(session, timedelta(seconds=LONG_S))
    with pytest.raises(RecycleError, match="the store can't set key 'large'") as refused:
        store.set("large", bytes(size))
    assert "\n" not in str(refused.value)
    store.set("small", "value")
    assert store.get("small") == b"value" and not store.check(["large"])


def test_more_keys_than_a_message_has_are_refused_and_the_store_goes_on(alone):
    _, session = alone
    store = ScriptStore(session, timedelta(seconds=LONG_S))
    store.set("k", "value")
    assert store.check(["k"] * ENTRIES)
    with pytest.raises(RecycleError, match=f"at most {ENTRIES}"):
        store.check(["k"] * (ENTRIES + 1))
    assert store.get("k") == b"value"


def test_the_timeout_that_a_script_sets_holds_for_its_waits(alone):
    _, session = alone
    store = dist.PrefixStore("of a script", ScriptStore(session, timedelta(hours=1)))
    store.set_timeout(timedelta(milliseconds=50))
    with pytest.raises(dist.DistStoreError, match="of a script/nobody"):
        store.get("nobody")


def test_a_fork_of_a_worker_has_no_store(alone):
    _, session = alone
    session.forked = True
    with pytest.raises(RecycleError, match="forked"):
        ScriptStore(session, timedelta(seconds=LONG_S)).set("a", "b")


def test_a_clone_has_the_same_keys(alone):
    _, session = alone
    store = ScriptStore(session, timedelta(seconds=LONG_S))
    prefixed = dist.PrefixStore("of a script", store)
    for one, other in ((store, store.clone()), (prefixed, prefixed.clone())):
        other.set_timeout(timedelta(milliseconds=50))
        one.set("a", "b")
        assert other.get("a") == b"b"
        with pytest.raises(dist.DistStoreError, match="nobody"):
            other.get("nobody")
    assert store.timeout == timedelta(seconds=LONG_S), "each has a timeout of its own"
