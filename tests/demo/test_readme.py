"""What the README promises and this repository can check."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_links_and_commands_lead_somewhere():
    linked = [
        target.partition("#")[0] for target in re.findall(r"\]\(([^)]+)\)", README) if not target.startswith("https://")
    ]
    named = re.findall(r"(?:scripts|tests)/[\w/.]*\w", README)
    assert "scripts/pictures/failure.png" in linked
    assert {"scripts/demo", "scripts/test"} <= set(named)
    assert [name for name in {*linked, *named} if not (ROOT / name).exists()] == []


def test_the_pictures_are_small():
    assert [path.name for path in (ROOT / "scripts/pictures").iterdir() if path.stat().st_size > 300_000] == []
