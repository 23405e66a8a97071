"""The ``recycle`` command.  The module of a subcommand is imported for that one, and for the list of all."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec

from recycle_plugin import __version__
from recycle_plugin.errors import RecycleError
from recycle_plugin.versions import how_to_install

COMMANDS = {
    word: f"recycle_plugin.commands.{module}"
    for module, words in (
        ("demo", ("demo",)),
        ("doctor", ("doctor",)),
        ("plan", ("plan",)),
        ("status", ("status",)),
        ("top", ("top",)),
        ("operate", ("leave", "drain", "admit")),
        ("report", ("report",)),
        ("clean", ("clean",)),
        ("log", ("log",)),
        ("docs", ("docs",)),
        ("settings", ("settings",)),
    )
    for word in words
}
"""The module of each subcommand, in the order in which help lists them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit code: 0; 1 where a job, a plan or a check is not as wanted; 2 with one line on
    stderr for a user's mistake; 130 after Ctrl-C.
    """
    words = sys.argv[1:] if arguments is None else arguments
    found = _parser(words[0] if words else "").parse_args(words)
    try:
        return found.run(found) or 0
    except BrokenPipeError:  # whoever reads, head for instance, has seen enough
        sys.stdout = open(os.devnull, "w")
        return 0
    except KeyboardInterrupt:
        return 130
    except (
        ValueError,
        OSError,
        RecycleError,
    ) as error:  # what users can mend: settings, overrides, paths; SettingsError is a ValueError
        print(f"recycle: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if not (line := how_to_install(error)):
            raise
        print(f"recycle: {line}", file=sys.stderr)
        return 2


def _parser(word: str) -> argparse.ArgumentParser:
    """The parser of the subcommand ``word``; where that is none, of all of them."""
    parser = argparse.ArgumentParser(
        prog="recycle", description="fault-tolerant pipeline-parallel training without spares"
    )
    parser.add_argument("--version", action="version", version=f"recycle_plugin {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")

    modules = {**COMMANDS, **of_the_lab()}
    for module in (modules[word],) if word in modules else dict.fromkeys(modules.values()):
        import_module(module).add(commands)
    return parser


def of_the_lab() -> dict[str, str]:
    """The subcommands that study the plugin: there where recycle_plugin.lab is, which a job does not need."""
    if find_spec("recycle_plugin.lab") is None:
        return {}
    return import_module("recycle_plugin.lab.commands").COMMANDS


if __name__ == "__main__":
    sys.exit(main())
