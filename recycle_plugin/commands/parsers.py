"""How commands are added to the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def command(
    commands: argparse._SubParsersAction, name: str, about: str, description: str, run: Callable
) -> argparse.ArgumentParser:
    """Return the parser of a new command; its help shows ``description`` as it is. ``about``: its line in the list."""
    made: argparse.ArgumentParser = commands.add_parser(
        name, help=about, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.set_defaults(run=run)
    return made
