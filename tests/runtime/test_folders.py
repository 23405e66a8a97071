"""Folders and files that stand under their name whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from recycle_plugin import folders


def folder(path: Path, **files: str) -> Path:
    path.mkdir()
    for name, text in files.items():
        (path / name).write_text(text)
    return path


def content(path: Path) -> dict[str, str]:
    return {each.name: each.read_text() for each in path.iterdir()}


def test_a_new_folder_gets_its_name(tmp_path):
    folders.put_in_place(folder(tmp_path / "made", a="1", b="2"), tmp_path / "final")
    assert content(tmp_path / "final") == {"a": "1", "b": "2"} and not (tmp_path / "made").exists()


@pytest.mark.parametrize("can_exchange", (True, False))
def test_what_stood_there_is_replaced_by_the_whole_of_the_other(tmp_path, monkeypatch, can_exchange):
    """Nothing of the two is mixed, also on file systems that can't exchange names."""
    if not can_exchange:
        monkeypatch.setattr(folders, "_exchange", lambda one, other: False)
    final = folder(tmp_path / "final", a="old", c="old")
    folders.put_in_place(folder(tmp_path / "made", a="new", b="new"), final)
    assert content(final) == {"a": "new", "b": "new"}
    assert content(tmp_path / "made") == {"a": "old", "c": "old"} and len(list(tmp_path.iterdir())) == 2


def test_a_file_holds_the_new_text_and_nothing_is_left_beside_it(tmp_path):
    path = tmp_path / "latest"
    for text in ("one", "a longer one", ""):
        folders.replace(folders.prepared(path, text), path)
        assert content(tmp_path) == {"latest": text}


def test_what_is_not_there_is_removed_without_a_word(tmp_path):
    folders.remove(folder(tmp_path / "left", a="1"))
    folders.remove(tmp_path / "left")
    assert not (tmp_path / "left").exists()
