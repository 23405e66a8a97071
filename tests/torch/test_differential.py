"""Random models, trained by the plugin and by stock autograd: the same bits, or a refusal by name.

``--models N`` says how many (default 100), ``--models-seed S`` which.
"""

from __future__ import annotations

import random
import re

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from recycle_plugin.errors import RecycleError
from tests.support.differential import compare
from tests.support.differential.model import HABITS, HALVES, MODES, OPTIMIZERS, Course, Model
from tests.support.differential.outcome import differ
from tests.support.differential.plugin import Plugin
from tests.support.differential.stock import Stuck
from tests.support.grammar import BOUNDARIES, CAN_NOT_TRAVEL, DATA, LOSSES, NO_LOSSES, PIECES, REFUSED

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore")


OWN_NUMBERS = "noise in the backward"  # keyed by the micro-batch, where stock autograd draws from the worker's stream


def may_be_refused(model: Model, line: str) -> bool:
    """Where a model has none of the REFUSED pieces: a worker has seen nothing depend on its first stage in a whole
    step, as where layers are cut off.
    """
    left_out = ("a lambda", "skipped by the data", "left out by Python's random", "left out by numpy's")
    return line.startswith("nothing that the first stage gives") and any(name in left_out for name in model.stages[0])


@st.composite
def models(draw: st.DrawFn, pieces: list[str] = sorted(set(PIECES) - {OWN_NUMBERS})) -> Model:
    count = draw(st.sampled_from((1, 2, 2, 3)))
    stages = tuple(tuple(draw(st.lists(st.sampled_from(pieces), min_size=1, max_size=3))) for _ in range(count))
    return Model(
        stages,
        tuple(draw(st.sampled_from(sorted(BOUNDARIES))) for _ in range(count - 1)),
        draw(st.sampled_from(sorted(DATA))),
        draw(st.sampled_from(sorted(LOSSES))),
        draw(st.sampled_from(sorted(OPTIMIZERS))),
        draw(st.sampled_from(sorted(HABITS))),
        draw(st.sampled_from((torch.float32, torch.float32, torch.float64, *HALVES))),
        draw(st.integers(0, 999)),
    )


courses = st.builds(
    Course,
    st.sampled_from(MODES),
    st.integers(1, 3),
    st.integers(0, 999),
    st.booleans(),
    st.booleans(),
    st.sampled_from((None, None, 1, 2)),
)


@pytest.mark.timeout(3600)
def test_random_models_have_the_same_bits_as_with_stock_autograd(request):
    """Models that stock autograd itself refuses (a tensor changed in place that it needs, no row to attend to) count
    for nothing.
    """
    tried = {"equal": 0, "refused by stock": 0, "refused by name": 0}

    @seed(request.config.getoption("--models-seed"))
    @settings(
        max_examples=request.config.getoption("--models"),
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    @given(models(), courses)
    def check(model: Model, course: Course) -> None:
        try:
            found = compare(model, course)
        except Stuck:
            tried["refused by stock"] += 1
            return
        except RecycleError as refusal:
            assert "\n" not in str(refusal) and may_be_refused(model, str(refusal)), f"{model}\n{course}\n{refusal}"
            tried["refused by name"] += 1
            return
        assert not found, f"{model}\n{course}\n" + "\n".join(found[:5])
        tried["equal"] += 1

    check()
    print(tried)
    assert tried["equal"] > 5 * (tried["refused by stock"] + tried["refused by name"])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", sorted(set(PIECES) - {OWN_NUMBERS}))
def test_each_piece_has_the_same_bits_as_with_stock_autograd(name, mode):
    model, course = Model((("linear", name, "linear"), ("linear",)), ("a tensor",)), Course(mode, 1, 3)
    assert compare(model, course) == []


@pytest.mark.parametrize("mode", ("split", "fused"))
@pytest.mark.parametrize(
    "more",
    [{"boundaries": (name, name)} for name in BOUNDARIES]
    + [{"data": name} for name in DATA]
    + [{"loss": name} for name in LOSSES]
    + [{"habit": name} for name in HABITS]
    + [{"frozen": stage} for stage in range(3)],
    ids=lambda more: " ".join(map(str, *more.items())),
)
def test_whatever_travels_goes_in_and_comes_out(more, mode):
    pieces = ("linear",), ("linear", "perceptron with dropout"), ("linear",)
    assert (
        compare(Model(**{"stages": pieces, "boundaries": ("a tensor", "a tensor"), **more}), Course(mode, seed=3)) == []
    )


@pytest.mark.parametrize("mode", MODES)
def test_what_is_drawn_in_a_backward_is_the_same_whoever_runs_it(mode):
    model = Model((("linear",), (OWN_NUMBERS,), (OWN_NUMBERS, "perceptron with dropout")), ("a tensor", "views"))
    made = [Plugin(model, Course(mode, 1, number, dies=number % 2 == 1)).step(1) for number in range(6)]
    for other in made[1:]:
        assert all(
            not differ(*each)
            for key in made[0].gradients
            for each in zip(made[0].gradients[key], other.gradients[key], strict=True)
        )
        assert all(not differ(made[0].sums[key], other.sums[key], 1e-5) for key in made[0].sums)


# --- what is refused --------------------------------------------------------------------------------


def first_step(model: Model, course: Course) -> str:
    with pytest.raises(RecycleError) as refusal:
        Plugin(model, course).step(1)
    line = str(refusal.value)
    assert "\n" not in line and len(line) < 500
    return line


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", sorted(REFUSED))
def test_pieces_that_are_refused_by_name_at_the_first_step(name, mode):
    for number in range(2):
        drawn = random.Random(number)
        beside = [drawn.choice(sorted(PIECES)) for _ in range(2)]
        stages = ((beside[0], name), (beside[1],)) if number % 2 else ((beside[0],), ("linear", name, beside[1]))
        line = first_step(Model(stages, ("a tensor",), seed=number), Course(mode, seed=number, again=False))
        assert re.search(REFUSED[name][1], line), line


@pytest.mark.parametrize("name", sorted(CAN_NOT_TRAVEL))
def test_what_can_not_travel_is_refused(name):
    assert CAN_NOT_TRAVEL[name][1] in first_step(Model((("linear",), ("linear",)), (name,)), Course())


@pytest.mark.parametrize("name", sorted(NO_LOSSES))
def test_losses_that_are_none_are_refused(name):
    line = first_step(Model((("linear",), ("linear",)), ("a tensor",), loss=name), Course())
    assert line.startswith(f"the loss of a micro-batch {NO_LOSSES[name][1]}")
