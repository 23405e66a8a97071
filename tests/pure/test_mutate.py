"""scripts/mutate.py makes the mistakes that it says, the same ones for the same seed, and knows who finds them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
TOY = '''
LIMIT = 3


class Counter:
    def __init__(self) -> None:
        self.total = 0

    def __repr__(self) -> str:
        return "none" if self.total == 0 else "some"

    def add(self, number: int = 1, log=None) -> None:
        """Counts what is small."""
        if number < LIMIT and number:
            self.total += number
        elif log:
            log.say("large", number + 1)
            log.append(f"{number + 1} is too large")


def least(values):
    return min(values) + 1


def unseen(values):
    return len(values) >= 0
'''
EXPECTED = [
    ("Counter.__init__", "off by one", "self.total = 0", "self.total = 1"),
    ("Counter.add", "condition dropped", "if number < LIMIT and number:", "if True:"),
    ("Counter.add", "condition dropped", "if number < LIMIT and number:", "if False:"),
    ("Counter.add", "condition dropped", "if number < LIMIT and number:", "if number < LIMIT:"),
    ("Counter.add", "condition dropped", "if number < LIMIT and number:", "if number:"),
    ("Counter.add", "comparison swapped", "if number < LIMIT and number:", "if number <= LIMIT and number:"),
    ("Counter.add", "state not set", "self.total += number", "pass"),
    ("Counter.add", "condition dropped", "if log:", "if True:"),
    ("Counter.add", "condition dropped", "if log:", "if False:"),
    ("Counter.add", "call skipped", "log.append(f'{number + 1} is too large')", "pass"),
    ("least", "comparison swapped", "return min(values) + 1", "return max(values) + 1"),
    ("least", "off by one", "return min(values) + 1", "return min(values) + 2"),
    ("least", "off by one", "return min(values) + 1", "return min(values) + 0"),
    ("unseen", "comparison swapped", "return len(values) >= 0", "return len(values) > 0"),
    ("unseen", "off by one", "return len(values) >= 0", "return len(values) >= 1"),
]
TEST = """
import toy


def test_least():
    assert toy.least([1, 2]) == 2


def test_counter():
    counter = toy.Counter()
    counter.add(1)
    counter.add(4)
    while counter.total != 1:  # or it never ends
        pass
"""


@pytest.fixture
def scripts(monkeypatch) -> tuple[ModuleType, ModuleType]:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("mutants"), importlib.import_module("mutate")


def described(mutant) -> tuple[str, str, str, str]:
    return mutant.function, mutant.kind, mutant.before, mutant.after


def test_the_mutants_of_a_module(scripts) -> None:
    """None of texts, defaults, what is only said, or how it prints."""
    assert sorted(map(described, scripts[0].mutants(TOY, "toy"))) == sorted(EXPECTED)


def test_a_sample_is_the_same_whatever_else_is_added(scripts) -> None:
    mutants = scripts[0]
    before = mutants.sample(mutants.mutants(TOY, "toy"), seed=1)
    more = TOY.replace("LIMIT = 3", "LIMIT = 3\n\n\ndef further(x):\n    return x + 1 if x else 2")
    after = mutants.sample(mutants.mutants(more, "toy"), seed=1)
    assert len(after) > len(before) == len(EXPECTED)
    assert [mutant.name for mutant in after if mutant.function != "further"] == [mutant.name for mutant in before]
    assert [mutant.name for mutant in mutants.sample(before, seed=2)] != [mutant.name for mutant in before]


def test_each_module_has_one_behind_the_first_forty(scripts) -> None:
    mutants = scripts[0]
    many = "def f(x):\n    return " + " + ".join(f"{number} * x" for number in range(100, 200))
    found = mutants.sample(
        [
            *mutants.mutants(many, "many"),
            *mutants.mutants(TOY, "toy"),
            *mutants.mutants("def g(x):\n    return x < 1", "few"),
        ],
        seed=1,
    )
    assert {mutant.module for mutant in found[:43]} == {"many", "toy", "few"}
    assert len(found) == len(set(found)) == 200 + len(EXPECTED) + 3


def test_what_a_test_kills_is_found_and_what_none_sees_survives(scripts, tmp_path, monkeypatch) -> None:
    mutants, mutate = scripts
    file, test = tmp_path / "toy.py", tmp_path / "test_toy.py"
    file.write_text(TOY)
    test.write_text(TEST)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "toy", raising=False)
    toy = importlib.import_module("toy")
    units = mutate.Units((str(test),), deadline_s=2.0)
    wanted = {EXPECTED[-4][1:], EXPECTED[6][1:], EXPECTED[-2][1:]}
    work = [
        (each, lambda each=each: mutants.install(TOY, each, str(file)), units)
        for each in mutants.mutants(TOY, "toy")
        if described(each)[1:] in wanted
    ]
    results = {mutant.function: result for mutant, result in mutate.run(iter(work), jobs=2)}
    assert (results["least"]["found"], results["least"]["by"].rpartition("::")[2]) == ("unit", "test_least")
    assert (results["Counter.add"]["found"], results["Counter.add"]["by"].rpartition("::")[2]) == (
        "deadline",
        "test_counter",
    )
    assert results["unseen"]["found"] is None
    assert toy.least([1, 2]) == 2, "nothing is changed here"
    monkeypatch.delitem(sys.modules, "toy")
