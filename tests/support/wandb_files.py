"""What Weights & Biases has written offline."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK, HEAD, FILE_HEAD = 32768, 7, 7  # bytes: a log of LevelDB's, behind a head of W&B's


def runs(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The rows of history of each run, by its name, in the order in which they were written."""
    found: dict[str, list[dict[str, Any]]] = {}
    for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb"), key=lambda file: file.stat().st_mtime):
        rows = found.setdefault(file.stem.removeprefix("run-"), [])
        for record in _records(file):
            if record.WhichOneof("record_type") == "history":
                rows.append(
                    {
                        (item.key or "/".join(item.nested_key)): json.loads(item.value_json)
                        for item in record.history.item
                    }
                )
    return found


def _records(file: Path) -> Iterator[Any]:
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, whole = file.read_bytes(), FILE_HEAD, b""
    while place + HEAD <= len(data):
        if (left := BLOCK - place % BLOCK) < HEAD:
            place += left
            continue
        size, kind = struct.unpack_from("<HB", data, place + 4)
        whole += data[place + HEAD : place + HEAD + size]
        place += HEAD + size
        if kind in (1, 4):  # whole, or its last part
            yield Record.FromString(whole)
            whole = b""
