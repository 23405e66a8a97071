"""What a worker holds is what the formula says (core/vocabulary/worker_bytes.py), for a table of settings: of how many
parameters it has, and of what it says of its stage itself.
"""

from __future__ import annotations

import pytest

from tests.support.memory import CASES, DEEPSPEED, Case, compared, compared_as_said, measured

NEAR = 0.05


@pytest.mark.some_of(4)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_formula_is_what_is_measured(request, tmp_path, case: Case):
    server = request.getfixturevalue("server" if case.vehicle is DEEPSPEED else "plain_server")
    workers = measured(server, tmp_path, case)
    found = [each for worker in workers for way in (compared, compared_as_said) for each in way(case, worker)]
    for each in found:
        print(f"{each.moment}: {each.expected / each.parameters:.2f}, measured {each.found / each.parameters:.2f}")
    wrong = [each for each in found if each.apart > NEAR]
    assert not wrong, wrong
