"""Two thousand simulated jobs with failures end as they did when they were written down.

Where a change of the protocol is meant to change them, they are written anew, with ``--freeze``, by the commit that
says why.
"""

from __future__ import annotations

import json

import pytest

from recycle_plugin.lab.simulator import seeded
from tests.support import frozen

COUNT = 2000


def test_what_is_written_down_is_what_was_meant() -> None:
    for seed in range(300):
        given = seeded.scenario(seed)
        assert frozen.read(json.loads(json.dumps(frozen.write(given)))) == given


@pytest.mark.timeout(1800)
def test_frozen_jobs_end_as_they_did(request) -> None:
    if request.config.getoption("--freeze"):
        frozen.freeze([seeded.scenario(seed) for seed in range(COUNT)])
    records = frozen.frozen()
    assert len(records) == COUNT
    chosen = records[:: COUNT // request.config.getoption("--frozen-jobs")]
    found = frozen.digests([frozen.read(record["scenario"]) for record in chosen])
    differ = [place for place, (record, now) in enumerate(zip(chosen, found)) if record["digest"] != now]
    assert not differ, f"{len(differ)} of {len(chosen)} jobs end otherwise, the first is {chosen[differ[0]]}"


def test_a_mistake_in_the_protocol_changes_a_digest(monkeypatch) -> None:
    from tests.mistakes import MISTAKES

    records = frozen.frozen()[:40]
    MISTAKES["a weight gradient is left out"](monkeypatch)
    with pytest.raises(AssertionError):
        assert [frozen.digest(frozen.read(record["scenario"])) for record in records] == [
            record["digest"] for record in records
        ]
