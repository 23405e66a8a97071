"""Kills close together in real jobs, seeded: at named instructions, at points of recovery and from outside.

The ideas are those of ``recycle campaign``; here torch, Gloo and, in one of them, DeepSpeed are real,
and the weights are compared.
"""

from __future__ import annotations

import pytest

from recycle_plugin.core.vocabulary.faults import Fault
from recycle_plugin.core.vocabulary.instruction import Instruction
from tests.support.double_faults import POINTS, SHAPES, VARIANTS, kill_all, scenario
from tests.support.jobs import assert_same_training

pytestmark = pytest.mark.plain_too


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(metafunc.config.getoption("--real-seeds")))


def test_kills_close_together(launch, reference, tmp_path, seed):
    """A named kill whose instruction is not reached any more (a peer runs it, or nobody has to) is none; whichever
    comes first is reached.
    """
    given = scenario(seed)
    print(
        f"seed {seed}: {given.shape.replicas}x{given.shape.stages}, {' '.join(given.variant) or 'default'}: "
        f"{', '.join(given.named)}; outside: {given.outside}"
    )
    result = kill_all(launch, tmp_path / "gate", given, *given.variant)
    struck = {str(Fault.parse(event["fault"])) for event in result.of("fault")}
    lost = {str(Fault.parse(fault).seat) for fault in struck} | ({given.outside[0]} if given.outside else set())
    assert struck
    assert_same_training(
        result, reference(*[each for each in given.variant if "clipping" in each], shape=given.shape), lost
    )


def test_the_seeds_hit_much():
    """Of sixty: all variants on both shapes, kills during recovery, from outside, and all kinds of instruction."""
    found = [scenario(seed) for seed in range(60)]
    assert {(given.shape, given.variant) for given in found} == {
        (shape, variant) for shape in SHAPES for variant in VARIANTS
    }
    kills = [Fault.parse(text) for given in found for text in given.named]
    assert {kill.where for kill in kills if kill.when == "at"} == {point.partition(":")[0] for point in POINTS}
    assert {Instruction.parse(kill.where).op.name for kill in kills if kill.when != "at"} >= {
        "F",
        "I",
        "W",
        "B",
        "REDUCE",
        "VALIDATE",
        "STEP",
    }
    assert sum(given.outside is not None for given in found) > 10
