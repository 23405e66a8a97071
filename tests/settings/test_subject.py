"""scripts/subject: what a commit's subject may be, as git shows it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "subject"
LONG = 73 * "x"


@pytest.mark.parametrize(
    "message, code",
    (
        ("short", 0),
        (72 * "ü", 0),
        (LONG, 1),
        (f"{70 * 'x'}   \n", 0),
        (f"\n\n{LONG}", 1),
        (f"# a comment {LONG}\nshort", 0),
        (f"{40 * 'a'}\n{40 * 'b'}", 1),
        (f"short\n\n{LONG}", 0),
        (f"Merge branch '{LONG}'", 0),
        (f"fixup! {LONG}", 0),
    ),
)
def test_a_subject_has_at_most_72_characters(tmp_path, message, code):
    (tmp_path / "message").write_text(message)
    done = subprocess.run([SCRIPT, tmp_path / "message"], capture_output=True, text=True, timeout=60)
    assert done.returncode == code and bool(done.stderr) == bool(code), done.stderr
