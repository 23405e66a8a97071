"""The ``recycle`` command. It imports only the module of the given subcommand, or all of them to list them."""

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
        ("doctor", ("doctor",)),
        ("plan", ("plan",)),
        ("status", ("status",)),
        ("top", ("top",)),
        ("operate", ("leave", "drain", "admit")),
        ("report", ("report",)),
        ("clean", ("clean",)),
        ("docs", ("docs", "settings")),
    )
    for word in words
}
"""{subcommand: module}, in the order of the help."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand and return the exit code. 0 for success; 1 if a job, a plan or a check is not as wanted; 2 for a
    user's mistake, with one line on stderr; 130 after Ctrl-C.
    """
    words = sys.argv[1:] if arguments is None else arguments
    found = _parser(words[0] if words else "").parse_args(words)
    try:
        return found.run(found) or 0
    except BrokenPipeError:  # the reader, head for instance, has seen enough
        sys.stdout = open(os.devnull, "w")
        return 0
    except KeyboardInterrupt:
        return 130
    except (
        ValueError,
        OSError,
        RecycleError,
    ) as error:  # the user can correct settings, overrides, paths; SettingsError is a ValueError
        print(f"recycle: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if not (line := how_to_install(error)):
            raise
        print(f"recycle: {line}", file=sys.stderr)
        return 2


def _parser(word: str) -> argparse.ArgumentParser:
    """Return the parser of the subcommand ``word``, or of all subcommands if ``word`` is none of them."""
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
    """Return {subcommand: module} of recycle_plugin.lab, which jobs do not need; {} if it is not installed."""
    if find_spec("recycle_plugin.lab") is None:
        return {}
    return import_module("recycle_plugin.lab.commands").COMMANDS


if __name__ == "__main__":
    sys.exit(main())
