"""The small job of checks/small_job.py with its device watched; the plugin's launcher runs it on each worker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from recycle_plugin.lab.checks.small_job import main
from recycle_plugin.lab.gpu.watched import Watched


@contextmanager
def watched() -> Iterator[dict[str, Any]]:
    """Yield the entries of a worker's record, which are filled in at the end."""
    seen: dict[str, Any] = {}
    with Watched() as watch:
        yield seen
    seen |= {"watched": watch.on, "synchronisations": watch.found}


if __name__ == "__main__":
    main(watched)
