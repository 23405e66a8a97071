"""Which boundaries are logged: the best ones within the budget, by a dynamic program."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from math import isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recycle_plugin.core.vocabulary.log_boundaries import groups
from recycle_plugin.planner.log_selection import Line, best, choose, choose_anew, in_bytes, selection

FOUR = Line(
    recompute_s=(1.0, 2.0, 3.0, 4.0),
    boundary_bytes=(100, 200, 400),
    failure=(0.25, 0.25, 0.25, 0.25),
    hosts=("a", "a", "b", "c"),
    load_s=5.0,
    every=10,
    network_bytes_per_s=1000.0,
    read_bytes_per_s=500.0,
)


@st.composite
def lines(draw, most: int = 8) -> Line:
    stages = draw(st.integers(1, most))
    times = st.integers(0, 40).map(lambda each: each / 4)
    sizes = draw(st.sampled_from((st.integers(1, 9), st.just(5), st.integers(0, 3), st.integers(1, 10**9))))

    def several(of: st.SearchStrategy, count: int) -> tuple:
        return tuple(draw(st.lists(of, min_size=count, max_size=count)))

    return Line(
        several(times, stages),
        several(sizes, stages - 1),
        several(st.integers(1, 8).map(lambda each: each / 8), stages),
        tuple(map(str, range(stages))),
        draw(times),
        draw(st.integers(1, 20)),
        draw(st.sampled_from((0.5, 4.0, 1e9))),
        draw(st.sampled_from((0.5, 4.0, 1e9))),
    )


def shares(line: Line) -> st.SearchStrategy[int]:
    return st.integers(0, line.log_bytes(range(line.stages - 1)) + 1)


def exhaustive(line: Line, budget: int | None) -> float:
    """The least expected time of a recovery, by the model's own words: every set of boundaries is tried."""
    every = range(line.stages - 1)
    sets = [set(each) for count in range(line.stages) for each in combinations(every, count)]
    within = [
        each for each in sets if budget is None or line.every * sum(line.boundary_bytes[b] for b in each) <= budget
    ]
    return min(expected(line, each) for each in within)


def expected(line: Line, logged: set[int]) -> float:
    total = 0.0
    for stage in range(line.stages):
        first = last = stage
        while first > 0 and first - 1 not in logged:
            first -= 1
        while last < line.stages - 1 and last not in logged:
            last += 1
        around = [each for each in (first - 1, last) if 0 <= each < line.stages - 1]
        step = sum(line.recompute_s[first : last + 1])
        step += sum(line.boundary_bytes[first:last]) / line.network_bytes_per_s
        step += sum(line.boundary_bytes[each] for each in around) / line.read_bytes_per_s
        total += line.failure[stage] * (line.load_s + line.every / 2 * step)
    return total


def test_the_model() -> None:
    """Boundary 1 is logged: {0, 1} and {2, 3}."""
    assert FOUR.step_s(0, 2) == pytest.approx(1 + 2 + 100 / 1000 + 200 / 500)
    assert FOUR.step_s(2, 4) == pytest.approx(3 + 4 + 400 / 1000 + 200 / 500)
    assert FOUR.recovery_s(2, 4) == pytest.approx(5 + 5 * 7.8)
    found = selection(FOUR, (1,), 2000)
    assert found.groups == ((0, 2), (2, 4)) and found.log_bytes == 2000 and found.fits
    assert found.expected_s == pytest.approx(0.5 * (5 + 5 * 3.5) + 0.5 * (5 + 5 * 7.8))
    assert found.worst_s == pytest.approx(44.0)


@given(lines(), st.data())
def test_the_expected_time_is_that_of_the_model(line, data) -> None:
    logged = sorted(data.draw(st.sets(st.integers(0, line.stages - 2)))) if line.stages > 1 else []
    assert isclose(line.expected_s(logged), expected(line, set(logged)), abs_tol=1e-9)


@given(lines(), st.data())
def test_the_program_finds_the_best(line, data) -> None:
    budget = data.draw(shares(line) | st.none())
    found = best(line, budget)
    assert budget is None or line.log_bytes(found) <= budget
    assert isclose(line.expected_s(found), exhaustive(line, budget), abs_tol=1e-9)


@given(lines(), st.data())
def test_more_room_is_never_worse(line, data) -> None:
    small, large = sorted(data.draw(st.tuples(shares(line), shares(line))))
    few, many = (line.expected_s(best(line, budget)) for budget in (small, large))
    assert many <= few or isclose(many, few, abs_tol=1e-9)


@given(lines(), st.data())
def test_a_line_that_is_turned_round_has_the_same_time(line, data) -> None:
    budget = data.draw(shares(line))
    turned = replace(
        line,
        recompute_s=line.recompute_s[::-1],
        boundary_bytes=line.boundary_bytes[::-1],
        failure=line.failure[::-1],
        hosts=line.hosts[::-1],
    )
    assert isclose(line.expected_s(best(line, budget)), turned.expected_s(best(turned, budget)), abs_tol=1e-9)


def test_a_slow_disk_is_not_read_where_a_neighbour_is_quicker() -> None:
    line = replace(FOUR, read_bytes_per_s=1.0)
    assert best(line) == ()
    assert best(replace(FOUR, read_bytes_per_s=1e9)) == (0, 1, 2)


def test_a_long_line_of_equal_boundaries_is_soon_done() -> None:
    """Its cost grows with the third power of the stages, not with their number of sets, which is 2^127."""
    line = Line((1.0,) * 128, (1000,) * 127, (1 / 128,) * 128, ("h",) * 128, 1.0, 100, 1e6, 1e6)
    found = best(line, 63 * 100 * 1000)
    sizes = [end - first for first, end in groups(found, line.stages)]
    assert len(found) == 63 and set(sizes) == {2}


def test_what_the_setting_says() -> None:
    assert choose(FOUR, "all").logged == (0, 1, 2)
    assert choose(FOUR, "hosts").logged == (1, 2)
    assert choose(FOUR, [2, 0, 2]).logged == (0, 2)
    assert choose(FOUR, []).logged == ()
    assert choose(FOUR, "auto", 0).logged == ()
    assert choose(FOUR, "auto", 3000).logged == best(FOUR, 3000)
    assert not choose(FOUR, "all", 6999).fits and choose(FOUR, "all", 7000).fits


@pytest.mark.parametrize(
    "boundaries, said", [("some", "it has to be auto, all, hosts or a list"), ([3], "there is no boundary 3: 4 stages")]
)
def test_another_setting_is_refused(boundaries, said) -> None:
    with pytest.raises(ValueError, match=said):
        choose(FOUR, boundaries)


def test_it_says_what_it_means() -> None:
    assert str(choose(FOUR, "hosts", 10)) == (
        "logged: 1|2, 2|3; stages 0 to 1 replay together; 6 kB between checkpoints, one every 10 steps, more than the "
        "budget of 0.01 kB; a recovery takes 25 s on average, 29 s if the slowest group fails"
    )
    assert "; 6 kB between checkpoints, one every 10 steps, within the budget of 6 kB; " in str(
        choose(FOUR, "hosts", 6000)
    )
    assert str(choose(FOUR, [])).startswith("logged: no boundary; stages 0 to 3 replay together; 0 kB between ")
    assert str(choose(FOUR, [1])).startswith("logged: 1|2; stages 0 to 1 and 2 to 3 replay together; 2 kB between ")
    assert str(choose(FOUR, "all")).startswith("logged: 0|1, 1|2, 2|3; each stage replays alone; 7 kB between ")
    assert [in_bytes(each) for each in (98_304, 147_456, 503_316_480, 15_099_494_400)] == [
        "98.3 kB",
        "0.1475 MB",
        "503.3 MB",
        "15.1 GB",
    ]


def test_a_choice_changes_only_for_a_clearly_better_one() -> None:
    """Of the equal boundaries 0 and 2 either may be logged; a tenth of the time decides."""
    line = replace(FOUR, recompute_s=(1.0,) * 4, boundary_bytes=(100, 100, 100), read_bytes_per_s=1e9)
    best_of = {budget: choose(line, "auto", budget).logged for budget in (1000, 2000)}
    assert best_of == {1000: (1,), 2000: (0, 1)}
    assert choose_anew(line, (1, 2), 2000).logged == (1, 2), "it is as good"
    assert choose_anew(line, (0, 1), 1000).logged == (1,), "two are more than the budget now"
    assert choose_anew(line, (1,), 3000).logged == (0, 1, 2), "and now there is room for all"
    slightly = replace(line, recompute_s=(1.0, 1.0, 1.0, 1.1))
    assert choose(slightly, "auto", 2000).logged == (1, 2), "by 2%"
    assert choose_anew(slightly, (0, 1), 2000).logged == (0, 1)
