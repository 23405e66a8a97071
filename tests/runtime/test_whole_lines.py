"""What processes print beside each other."""

from __future__ import annotations

import io

from recycle_plugin.runtime.system.console import print_whole


class Unbuffered(io.TextIOBase):
    """As ``python -u`` has it: each write goes on as it is."""

    def __init__(self) -> None:
        self.written: list[str] = []

    def write(self, text: str) -> int:
        if text:
            self.written.append(text)
        return len(text)


def test_a_line_is_printed_in_one_write():
    to = Unbuffered()
    print_whole("a line", to)
    assert to.written == ["a line\n"]
