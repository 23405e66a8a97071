"""How far it is from a script's ``train_batch`` to the model: whoever reads one step follows three borders, and no
framework's names in between.
"""

from __future__ import annotations

import json

from tests.support.jobs import WRAPPED


def test_a_forward_crosses_two_borders_of_the_package(launch, tmp_path):
    """From DeepSpeed's engine into the worker runtime, through core's loop and executor, and back: into the first, 1,
    and between them, 2.
    """
    wraps = [{"name": "note_way", "folder": str(tmp_path), "at": "F0.0@3"}]
    assert launch("steps=4", script=WRAPPED, RECYCLE_TEST_WRAP=json.dumps(wraps)).finish().code == 0
    ways = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("way-*.json"))]
    assert len(ways) == 2 and all(way["packages"] == ["adapters", "runtime", "core", "runtime"] for way in ways), ways
