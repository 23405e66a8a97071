"""Megatron's .bin and .idx files as windows: what megatron-core has written is read across its documents' ends."""

from __future__ import annotations

import numpy
import pytest
import torch
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

from recycle_plugin.lab.training.indexed import IndexedWindows

LENGTHS = (5, 1, 12, 3, 20)  # of the documents


@pytest.fixture(params=(numpy.uint16, numpy.int32))
def prefix(request, tmp_path) -> str:
    """Files of documents whose tokens count up from 0."""
    builder = IndexedDatasetBuilder(f"{tmp_path}/tokens.bin", dtype=request.param)
    first = 0
    for length in LENGTHS:
        builder.add_item(torch.arange(first, first + length))
        builder.end_document()
        first += length
    builder.finalize(f"{tmp_path}/tokens.idx")
    assert DType.size(request.param) * first == (tmp_path / "tokens.bin").stat().st_size
    return f"{tmp_path}/tokens"


@pytest.mark.parametrize("sequence", (1, 4, 7, 40))
def test_windows_follow_each_other_across_documents(prefix, sequence):
    windows, total = IndexedWindows(prefix, sequence, 50), sum(LENGTHS)
    assert len(windows) == (total - 1) // sequence
    for index in range(len(windows)):
        ids, labels = windows[index]
        assert ids.dtype == labels.dtype == torch.int64
        assert ids.tolist() == list(range(index * sequence, (index + 1) * sequence))
        assert labels.tolist() == [one + 1 for one in ids.tolist()]
    with pytest.raises(IndexError):
        windows[len(windows)]


def test_bad_input_is_named(prefix, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"data.path: .*nowhere\.bin does not exist; write the prefix"):
        IndexedWindows(tmp_path / "nowhere", 4, 50)
    with pytest.raises(FileNotFoundError, match=r"data.path: None\.bin does not exist"):
        IndexedWindows(None, 4, 50)
    with pytest.raises(ValueError, match="has 41 tokens; one window of 41 and the token after it need 42"):
        IndexedWindows(prefix, 41, 50)
    with pytest.raises(ValueError, match="has token 12 in window 2, and model.vocabulary is 12; write at least 13"):
        IndexedWindows(prefix, 4, 12)[2]
