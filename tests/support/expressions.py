"""What the board for Grafana asks Prometheus for."""

from __future__ import annotations

import json
from pathlib import Path

import recycle_plugin

DOCS = Path(recycle_plugin.__file__).parent / "docs"


def targets() -> list[dict[str, str]]:
    """Each question of the board, with the legend of its answers."""
    return [
        target for panel in json.loads((DOCS / "grafana.json").read_text())["panels"] for target in panel["targets"]
    ]


def expressions() -> list[str]:
    return [target["expr"] for target in targets()]
