"""``recycle settings``: print the settings as the documents have them."""

from __future__ import annotations

import argparse

from recycle_plugin.commands.parsers import command

DESCRIPTION = """\
Print the settings of the "recycle" section as a table in Markdown: key, default, meaning.

recycle settings | less
"""


def add(commands: argparse._SubParsersAction) -> None:
    command(commands, "settings", 'print the settings of the "recycle" section as a table', DESCRIPTION, run)


def run(found: argparse.Namespace) -> int:
    """Print the table and return the exit code."""
    from recycle_plugin.settings.schema import reference

    print(reference())
    return 0
