"""Real text as windows: deterministic, addressed by index, and clear about what is missing."""

from __future__ import annotations

import pytest
import torch

from recycle_plugin.lab.training.text import TextWindows


def test_the_standard_library_is_the_default():
    windows = TextWindows(None, 64, limit_bytes=100_000)
    assert len(windows) == (100_000 - 1) // 64
    ids, labels = windows[3]
    assert ids.dtype == labels.dtype == torch.int64 and ids.shape == labels.shape == (64,)
    assert torch.equal(ids[1:], labels[:-1]) and labels[-1] == windows[4][0][0]
    assert torch.equal(TextWindows(None, 64, limit_bytes=100_000)[7][0], windows[7][0])
    assert "import" in bytes(windows._bytes.tolist()).decode("utf-8", "replace")


def test_files_in_the_order_of_their_names_up_to_the_limit(tmp_path):
    (tmp_path / "b.txt").write_text("world")
    (tmp_path / "a.py").write_text("hello ")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "a.py").write_text("left out")
    (tmp_path / "a.bin").write_bytes(b"left out")
    windows = TextWindows(tmp_path, 4)
    assert [bytes(ids.tolist()) for ids, _ in windows] == [b"hell", b"o wo"]
    assert len(TextWindows(tmp_path, 4, limit_bytes=8)) == 1
    assert bytes(TextWindows(tmp_path / "b.txt", 4)[0][1].tolist()) == b"orld"


def test_bad_input_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="data.path: .*nowhere does not exist; leave data.path out"):
        TextWindows(tmp_path / "nowhere", 4)
    (tmp_path / "a.txt").write_text("abcd")
    with pytest.raises(ValueError, match="has 4 bytes of text .*need 5"):
        TextWindows(tmp_path, 4)
    with pytest.raises(ValueError, match="sequence \\(0\\)"):
        TextWindows(tmp_path, 0)
    with pytest.raises(IndexError, match="window 1 of 1"):
        TextWindows(tmp_path, 3)[1]
