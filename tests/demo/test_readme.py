"""What the README promises and this repository can check."""

from __future__ import annotations

import re
from pathlib import Path

from recycle_plugin.settings import reference

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_settings_table_is_the_schemas():
    assert reference() in README, "README.md: replace the settings table by what `recycle settings` prints"


def test_links_and_commands_lead_somewhere():
    linked = [target for target in re.findall(r"\]\(([^)]+)\)", README) if not target.startswith("https://")]
    named = re.findall(r"(?:scripts|tests)/[\w/.]*\w", README)
    assert "scripts/pictures/failure.png" in linked and {"scripts/demo", "scripts/test"} <= set(named)
    assert [name for name in {*linked, *named} if not (ROOT / name).exists()] == []


def test_the_picture_is_small():
    assert (ROOT / "scripts/pictures/failure.png").stat().st_size < 300_000
