"""What a worker keeps of its collectives for others."""

from __future__ import annotations

import torch

from recycle_plugin.runtime.collectives.outcomes import ALL_BYTES, KEPT, KEPT_BYTES, LARGEST, Outcomes, Said


def test_they_may_come_to_an_end_in_any_order() -> None:
    said = Said()
    for number in (2, 0):
        said.add(number, [torch.full((1,), float(number))])
    assert [said.is_over(number) for number in range(4)] == [True, False, True, False] and said.end == 3
    said.add(1, None)
    assert all(said.is_over(number) for number in range(3)) and not said.after and said.end == 3
    assert said.values[1] is None and said.values[2] is not None and said.values[2].wait(0)[0].item() == 2.0


def test_new_sequences_let_the_values_of_those_unused_for_longest_go(coordinator) -> None:
    """As those of a script that has a new tag for each of its messages."""
    outcomes = Outcomes(coordinator.session(0))
    for number in range(most := ALL_BYTES // LARGEST):
        outcomes.add(f"line {number}", 0, [torch.zeros(LARGEST // 4)])
    outcomes.add("line 0", 1, None)
    outcomes.add("new", 0, [torch.zeros(LARGEST // 4)])
    kept = [line for line, said in outcomes._own.items() if any(value is not None for value in said.values.values())]
    assert kept == ["line 0", *(f"line {number}" for number in range(2, most)), "new"]
    assert all(said.is_over(0) for said in outcomes._own.values())


def test_the_oldest_values_are_let_go() -> None:
    small, large = [torch.zeros(1)], [torch.zeros(LARGEST // 4)]
    many = Said()
    for number in range(KEPT + 3):
        many.add(number, small)
    assert sorted(many.values) == list(range(3, KEPT + 3)) and many.count == KEPT + 3
    few = Said()
    for number in range(6):
        few.add(number, large)
    assert sorted(few.values) == list(range(6 - KEPT_BYTES // LARGEST, 6))
    few.add(6, [torch.zeros(LARGEST // 4 + 1)])
    assert few.values[6] is None and few.is_over(6)
