"""What the planner's loops are compiled to is kept on disk, as long as the planner's sources are the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from recycle_plugin.core.vocabulary import program
from recycle_plugin.planner import compiled as how
from tests.support.loaded import loaded


def hits(path: Path) -> int:
    """How often what was compiled before is used for the function in ``path``."""
    double = how.compiled(loaded(path, "loops").double)
    assert double(21) == 42
    return sum(double.stats.cache_hits.values())


@pytest.fixture
def loops(tmp_path) -> Path:
    path = tmp_path / "loops.py"
    path.write_text("def double(number):\n    return 2 * number\n")
    return path


@pytest.mark.parametrize(
    "damage", (lambda data: b"", lambda data: data[: len(data) // 2], lambda data: b"nonsense" * 20)
)
@pytest.mark.parametrize("kind", ("nbi", "nbc"))
def test_a_damaged_file_is_made_anew(loops, kind, damage):
    assert hits(loops) == 0
    (kept,) = loops.parent.rglob(f"*.{kind}")
    kept.write_bytes(damage(kept.read_bytes()))
    assert [hits(loops), hits(loops)] == [0, 1]


def test_the_words_that_loops_have_constants_of_are_sources(monkeypatch):
    read = []
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path) or b"")
    how.sources.__wrapped__()
    assert {Path(program.__file__), Path(how.__file__)} <= set(read)


CODE = 'def wait():\n    """Wait."""\n    return 1  # second\n'


@pytest.mark.parametrize(
    "old, new, same",
    (("Wait.", "Return.", True), ("second", "s", True), ("1", "2", False), ("    ret", "  ret", False)),
)
def test_sources_are_the_same_while_only_comments_and_docstrings_change(old, new, same):
    changed = CODE.replace(old, new)
    assert changed != CODE and (how.code_hash([changed.encode()]) == how.code_hash([CODE.encode()])) == same


def test_a_touched_file_is_not_compiled_again(loops):
    assert hits(loops) == 0
    loops.write_text(loops.read_text() + "\n# nothing\n")
    assert hits(loops) == 1


@pytest.mark.parametrize("same", (True, False))
def test_what_was_compiled_from_other_sources_is_compiled_again(loops, monkeypatch, same):
    assert hits(loops) == 0
    if not same:
        monkeypatch.setattr(how, "sources", lambda: "others")
    assert hits(loops) == same
