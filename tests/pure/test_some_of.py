"""Of tests with many cases that are much alike some run, chosen by a seed, and over many seeds all of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.tiers import not_chosen

MANY, FEW = 12, 2


def case(name: str, *marks: pytest.MarkDecorator) -> SimpleNamespace:
    marks = {mark.name: mark for mark in marks}
    return SimpleNamespace(nodeid=f"tests/test_x.py::{name}", get_closest_marker=marks.get)


CASES = [case(f"test_many[{number}]", pytest.mark.some_of(3)) for number in range(MANY)]
ALL = [case(f"test_few[{number}]", pytest.mark.some_of(3)) for number in range(FEW)] + [
    case("test_one"),
    case("test_unmarked[1]"),
]
LAUNCHED = case("test_many[launched]", pytest.mark.some_of(3), pytest.mark.real_launcher)


AMONG = [case(f"test_{name}", pytest.mark.some_of(1, among="long ones")) for name in ("a", "b", "c")]


def run(seed: int) -> list[str]:
    items = [*CASES, *ALL, LAUNCHED]
    left_out = not_chosen(items, seed)
    return [item.nodeid for item in items if item not in left_out]


def test_so_many_of_each_function_run_and_whatever_has_fewer() -> None:
    others = {item.nodeid for item in (*ALL, LAUNCHED)}
    for seed in range(20):
        assert others < set(run(seed)) and len(run(seed)) == len(others) + 3


def test_of_several_functions_with_one_word_so_many_run() -> None:
    chosen = []
    for seed in range(100):
        left_out = not_chosen(AMONG, seed)
        chosen += [item.nodeid for item in AMONG if item not in left_out]
    assert len(chosen) == 100 and set(chosen) == {item.nodeid for item in AMONG}


def test_the_seed_chooses_and_over_time_all_run() -> None:
    assert run(1) == run(1) and any(run(seed) != run(1) for seed in range(2, 5))
    assert {name for seed in range(100) for name in run(seed)} >= {item.nodeid for item in CASES}
