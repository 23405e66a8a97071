"""What scripts/test runs is there, and stays small."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import tiers

TESTS = Path(tiers.__file__).parent


@pytest.mark.parametrize("name", [*tiers.REST, *tiers.IN_JOBS])
def test_a_name_is_that_of_a_test(name: str) -> None:
    file, _, function = name.partition("::")
    text = (TESTS / file).read_text()
    assert not function or f"\ndef {function}(" in text or f"\nasync def {function}(" in text


def test_no_name_stands_in_two_tiers() -> None:
    assert not tiers.REST.keys() & tiers.IN_JOBS.keys()


def test_few_jobs_are_started_by_deepspeed() -> None:
    assert len(tiers.named(tiers.DEEPSPEED)) <= 16 + 3


def test_unit_tests_start_no_job() -> None:
    """A job of the package's own launcher or DeepSpeed's is started by what tests/support/cluster.py has."""
    starts = re.compile(r"\bForkServer\(|def test_\w+\([^)]*\b(launch|plain_server|references)\b")
    named = {name.partition("::")[0] for name in (*tiers.REST, *tiers.IN_JOBS)}
    found = [
        str(path.relative_to(TESTS))
        for folder in tiers.UNIT_FOLDERS
        for path in (TESTS / folder).rglob("test_*.py")
        if starts.search(path.read_text())
    ]
    assert not set(found) - named
