"""How a worker asks whether its host is about to be taken away."""

from __future__ import annotations

import pytest

from recycle_plugin.runtime.control import notice


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        ("true", None),
        ("test -e {there}", None),
        ("echo TRUE | grep -q TRUE", None),
        ("test -e {there}.not", ""),
        ("exit 22", ""),
        ("recycle-no-such-command", "the shell can't run it (exit code 127)"),
        ("{there}", "the shell can't run it (exit code 126)"),
    ],
)
def test_only_a_command_that_succeeds_is_a_notice(command, answer, tmp_path):
    there = tmp_path / "there"
    there.touch()
    assert notice._asked(command.format(there=there)) == answer


def test_a_command_that_does_not_end_is_none(monkeypatch):
    monkeypatch.setattr(notice, "ANSWER_S", 0.2)
    assert notice._asked("exec sleep 60") == "no answer within 0 s"
