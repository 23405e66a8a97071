"""The keys and values of the script's store at the coordinator: what each call answers, and who is told when."""

from __future__ import annotations

import json
from random import Random

import pytest
from torch.distributed import HashStore

from recycle_plugin.core.coordinator.facts.key_values import EACH, MOST, SHARE, KeyValues
from recycle_plugin.core.coordinator.state_dump import dump, load
from recycle_plugin.core.messages.encoding import LIMIT, encode
from recycle_plugin.core.messages.encoding import MOST as ENTRIES
from recycle_plugin.core.messages.from_coordinator import StoreAnswer
from recycle_plugin.core.messages.from_workers import StoreCall
from recycle_plugin.core.vocabulary.roster import WorkerId


def says(store: KeyValues, rank: int, number: int, call: str, keys: list[str], *values: bytes) -> list:
    """What is told to whom by this call, as (rank, number, values); a refusal has its text for values."""
    told: list[tuple[WorkerId, StoreAnswer]] = []
    store.call(StoreCall(rank, number, call, tuple(keys), values), lambda whom, answer: told.append((whom, answer)))
    assert all(len(encode(answer)) < LIMIT for _, answer in told)
    return [(whom.rank, answer.number, answer.why_not or answer.values) for whom, answer in told]


@pytest.mark.parametrize("seed", range(20))
def test_each_call_answers_what_torchs_store_does(seed):
    random, ours, torchs = Random(seed), KeyValues(), HashStore()
    for number in range(200):
        key, value = random.choice("abc"), random.choice((b"1", b"2", b"30"))
        call = random.choice(("set", "add", "append", "compare_set", "delete_key", "num_keys", "check", "get"))
        if call == "get" and not torchs.check([key]):
            call = "set"
        expected = random.choice((b"1", b"2", b""))
        given = (expected, value) if call == "compare_set" else (value,) if call in ("set", "add", "append") else ()
        ((_, answered, found),) = says(ours, 0, number, call, [key], *given)
        assert answered == number
        match call:
            case "set":
                torchs.set(key, value.decode())
            case "append":
                torchs.append(key, value.decode())
            case "add":
                assert int(found[0]) == torchs.add(key, int(value))
            case "compare_set":
                assert found[0] == torchs.compare_set(key, expected.decode(), value.decode())
            case "delete_key":
                assert found == ((b"1",) if torchs.delete_key(key) else (b"0",))
            case "num_keys":
                assert int(found[0]) == torchs.num_keys()
            case "check":
                assert found == ((b"1",) if torchs.check([key]) else (b"0",))
            case "get":
                assert found == (torchs.get(key),)


def test_a_wait_is_answered_once_all_its_keys_are_there_also_by_a_successor():
    store = KeyValues()
    assert says(store, 1, 7, "wait", ["a", "b"]) == []
    assert says(store, 0, 0, "set", ["b"], b"") == [(0, 0, ())]
    store = load(json.loads(json.dumps(dump(store))))
    assert says(store, 0, 1, "add", ["a"], b"1") == [(1, 7, ()), (0, 1, (b"1",))]
    assert says(store, 1, 8, "wait", ["b", "a"]) == [(1, 8, ())]
    assert not store.waits


def test_a_wait_that_is_over_is_forgotten():
    store = KeyValues()
    says(store, 1, 7, "wait", ["a", "b"])
    says(store, 1, 8, "wait", ["a"])
    assert says(store, 1, 7, "wait_no_more", ["a", "b"]) == []
    assert says(store, 0, 0, "set", ["a"], b"") == [(1, 8, ()), (0, 0, ())]
    assert not store.waits


def test_a_wait_takes_room_until_it_is_answered_or_its_worker_is_gone():
    store = KeyValues()
    says(store, 1, 7, "wait", ["a", "b"])
    says(store, 2, 7, "wait", ["b"])
    says(store, 3, 7, "wait", ["c"])
    assert store.used == 3 * EACH
    says(store, 0, 0, "set", ["a", "b"], b"one", b"")
    assert store.used == 3 * EACH + len("abone"), "two keys, and the wait of rank 3"
    store.forget(WorkerId(3, 1))
    assert list(store.waits) == ["c"], "another process of its rank"
    store.forget(WorkerId(3))
    assert not store.waits and store.used == 2 * EACH + len("abone")


def test_several_keys_are_set_together_or_none_of_them():
    store, large = KeyValues(), bytes(MOST)
    says(store, 1, 7, "wait", ["a"])
    for keys, *values in (
        (["a", "b"], b"one", large + b"x"),
        ([f"{number}" for number in range(9)], *[large] * 9),
        (["a", "b"], b"one"),
    ):
        ((rank, *_, why),) = says(store, 0, 0, "set", keys, *values)
        assert rank == 0 and isinstance(why, str)
        assert not store.values and store.used == EACH and "a" in store.waits
    assert says(store, 0, 1, "set", ["a", "a"], b"one", b"two") == [(1, 7, ()), (0, 1, ())]
    assert store.values == {"a": b"two"} and store.used == EACH + len("atwo")


def test_a_full_store_refuses_and_has_room_again():
    store, large = KeyValues(), bytes(MOST)
    fits = SHARE // (MOST + EACH + 1)
    for number in range(fits):
        assert says(store, 0, number, "set", [str(number)], large) == [(0, number, ())]
    ((*_, why),) = says(store, 0, 90, "set", ["x"], large)
    assert "MiB" in why and "x" not in store.values
    ((*_, why),) = says(store, 0, 91, "append", ["0"], b"x")
    assert "MiB" in why
    ((*_, why),) = says(store, 0, 92, "get", ["0", "1"])
    assert "MiB" in why
    for number in range(fits):
        says(store, 0, 100 + number, "delete_key", [str(number)])
    assert store.used == 0


@pytest.mark.parametrize("large, small", ((1, 0), (0, ENTRIES)), ids=("the largest value", "many small ones"))
def test_what_was_set_can_be_read(large, small):
    store, values = KeyValues(), {"large": bytes(MOST), "small": bytes(MOST // ENTRIES)}
    for key, value in values.items():
        assert says(store, 0, 0, "set", [key], value) == [(0, 0, ())]
    keys = ["large"] * large + ["small"] * small
    assert says(store, 0, 1, "get", keys) == [(0, 1, tuple(values[key] for key in keys))]


def test_what_no_store_says_is_answered_and_changes_nothing():
    for call, keys, *values in (
        ("rename", ["a"]),
        ("add", ["a"], b"one"),
        ("add", ["a"], b"%d" % (1 << 63)),
        ("add", []),
        ("set", ["a"]),
        ("compare_set", ["a"], b""),
        ("get", ["a"]),
    ):
        store = KeyValues()
        ((rank, number, why),) = says(store, 2, 5, call, keys, *values)
        assert (rank, number) == (2, 5) and isinstance(why, str)
        assert not store.values and store.used == 0


def test_a_key_costs_only_those_who_wait_for_it():
    """Setting one of many keys looks at the waits for that key."""
    store = KeyValues()
    for rank in range(1000):
        says(store, rank, 0, "wait", [f"of {rank}"])

    class Looked(dict):
        def __iter__(self):
            raise AssertionError("it goes through all")

        values = items = keys = __iter__

    store.waits = Looked(store.waits)
    assert says(store, 0, 1, "set", ["of 3"], b"") == [(3, 0, ()), (0, 1, ())]
