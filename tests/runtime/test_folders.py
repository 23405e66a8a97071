"""Folders and files that stand under their name whole or not at all."""

from __future__ import annotations

import errno
import io
from pathlib import Path

import pytest
import torch

from recycle_plugin import folders
from recycle_plugin.errors import RecycleError


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


def test_a_damaged_file_is_refused_in_words_whatever_bytes_are_others(tmp_path):
    """Python's zipfile raises what it likes."""
    saved, file = io.BytesIO(), tmp_path / "stage_00.pt"
    torch.save({"weights": torch.arange(5.0), "step": 3}, saved)
    whole, refused = saved.getvalue(), 0
    changed = [
        whole[:place] + bytes([whole[place] ^ mask]) + whole[place + 1 :]
        for place in range(0, len(whole), 3)
        for mask in (0x01, 0x80)
    ]
    for content in [*changed, *(whole[:size] for size in range(0, len(whole), 97))]:
        file.write_bytes(content)
        try:
            folders.verify(file)
        except RecycleError as error:
            refused += 1
            assert str(error).startswith(f"{file} is damaged: ") and str(error)[-2:] != ": "
    assert refused > len(changed) // 4
    file.write_bytes(whole)
    folders.verify(file)


@pytest.mark.parametrize("content", (b"global_step3\n", b"\xff\xfe"))
def test_a_damaged_name_of_the_latest_is_refused_in_words(tmp_path, content):
    (tmp_path / "latest").write_bytes(content)
    if content.isascii():
        assert folders.named_by(tmp_path / "latest") == tmp_path / "global_step3"
        return
    with pytest.raises(RecycleError, match=f"^{tmp_path}/latest is damaged, incomplete, or not of such a job: name"):
        folders.named_by(tmp_path / "latest")


def test_what_stood_there_stays_where_the_other_does_not_get_its_name(tmp_path, monkeypatch):
    """On a file system that can't exchange names: what is left beside it is removed later."""
    made, final = folder(tmp_path / "made", a="new"), folder(tmp_path / "final", a="old")
    rename = Path.rename

    def refusing(path: Path, target: Path) -> Path:
        if (path, target) == (made, final):
            raise OSError(errno.EIO, "broken")
        return rename(path, target)

    monkeypatch.setattr(folders, "_exchange", lambda one, other: False)
    monkeypatch.setattr(Path, "rename", refusing)
    with pytest.raises(OSError, match="broken"):
        folders.put_in_place(made, final)
    assert content(final) == {"a": "old"} and {path.name for path in tmp_path.iterdir()} == {"made", "final"}


def test_the_folders_in_one_are_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    made = tmp_path / "made"
    folder(made).joinpath("mp_rank_00").mkdir()
    synced: list[Path] = []
    monkeypatch.setattr(folders, "sync", synced.append)
    folders.put_in_place(made, tmp_path / "final")
    assert synced == [made / "mp_rank_00", made, tmp_path]
