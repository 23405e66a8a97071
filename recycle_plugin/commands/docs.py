"""``recycle docs`` and ``recycle settings``: print the documents that the package ships, and the table of settings."""

from __future__ import annotations

import argparse
import difflib
import re
from importlib.resources import files

from recycle_plugin.commands.parsers import command

DESCRIPTION = """\
Without a name: list the documents.  With one: print it, in Markdown.

recycle docs tutorial | less
"""
OF_SETTINGS = """\
Print the settings of the "recycle" section as a table in Markdown: key, default, meaning.

recycle settings | less
"""
_ROW = re.compile(r"^\| \[(\w+)\]\(\w+\.md\) \| (.+?) \|$", re.MULTILINE)


def add(commands: argparse._SubParsersAction) -> None:
    made = command(commands, "docs", "print the documents: tutorial, operations, settings, ...", DESCRIPTION, run)
    made.add_argument("name", metavar="NAME", nargs="?", help="one of the list")
    about = 'print the settings of the "recycle" section as a table'
    command(commands, "settings", about, OF_SETTINGS, run_settings)


def run(found: argparse.Namespace) -> int:
    """Print the list of documents, or one of them, and return the exit code. Raises ValueError for an unknown name."""
    print(listing() if found.name is None else document(found.name).rstrip())
    return 0


def run_settings(found: argparse.Namespace) -> int:
    """Print the table of settings and return the exit code."""
    from recycle_plugin.settings.schema import reference

    print(reference())
    return 0


def documents() -> dict[str, str]:
    """Return {document's name: the questions that it answers}, in the order of the index."""
    return dict(_ROW.findall(_text("index")))


def listing() -> str:
    known = documents()
    width = max(map(len, known))
    return "\n".join(f"{name:<{width}}  {answers}" for name, answers in known.items())


def document(name: str) -> str:
    """Return the text of the document ``name``. Raises ValueError, in one line, if there is none."""
    known = documents()
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        raise ValueError(
            f"there is no document {name!r}: "
            + (f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}")
        )
    return _text(name)


def _text(name: str) -> str:
    return (files("recycle_plugin") / "docs" / f"{name}.md").read_text(encoding="utf-8")
