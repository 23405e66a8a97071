"""What the planner's loops are compiled to is kept on disk, as long as the planner's sources are the same."""

from __future__ import annotations

import importlib.util

import pytest

from recycle_plugin.planner import compiled as how


@pytest.mark.parametrize("same", (True, False))
def test_what_was_compiled_from_other_sources_is_compiled_again(tmp_path, monkeypatch, same):
    path = tmp_path / "loops.py"
    path.write_text("def double(number):\n    return 2 * number\n")

    def hits() -> int:
        spec = importlib.util.spec_from_file_location("loops", path)
        spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
        double = how.compiled(module.double)
        assert double(21) == 42
        return sum(double.stats.cache_hits.values())

    assert hits() == 0
    if not same:
        monkeypatch.setattr(how, "sources", lambda: "others")
    assert hits() == same
