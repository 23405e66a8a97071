"""The ``recycle`` command.  What a subcommand needs is imported when it runs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from recycle_plugin import __version__
from recycle_plugin.errors import RecycleError
from recycle_plugin.versions import how_to_install


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit code: 0, or 2 with one line on stderr for a user's mistake."""
    found = _parser().parse_args(arguments)
    try:
        return found.run(found) or 0
    except BrokenPipeError:  # whoever reads, head for instance, has seen enough
        sys.stdout = open(os.devnull, "w")
        return 0
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="recycle", description="fault-tolerant pipeline-parallel training without spares"
    )
    parser.add_argument("--version", action="version", version=f"recycle_plugin {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")

    demo = commands.add_parser("demo", help="train on this machine, kill a worker, compare with the run without")
    demo.add_argument("--out", metavar="DIR", default=None, help="run folder (default: runs/demo)")
    demo.add_argument(
        "--scenario",
        metavar="NAME",
        default="worker",
        help="worker: one is killed (default); rejoin: it also comes back; replica: its whole replica goes and comes "
        "with it; stage: a stage's only worker is killed, and replays it from the log",
    )
    demo.add_argument(
        "--steps",
        metavar="N",
        type=int,
        default=None,
        help="optimizer steps of each of the two runs (default: 30; of rejoin 90)",
    )
    demo.set_defaults(run=_demo)

    from recycle_plugin.commands import docs, doctor, log, operate, plan, report, status

    for command in (doctor, plan, *_of_the_lab(), status, operate, report, log, docs):
        command.add(commands)

    settings = commands.add_parser("settings", help='print the settings of the "recycle" section as a table')
    settings.set_defaults(run=_settings)
    return parser


def _of_the_lab() -> Sequence[ModuleType]:
    """The subcommands that study the plugin: there where recycle_plugin.lab is, which a job does not need."""
    if find_spec("recycle_plugin.lab") is None:
        return ()
    return import_module("recycle_plugin.lab.commands").modules()


def _demo(found: argparse.Namespace) -> int:
    from recycle_plugin.commands import demo

    return demo.run(found.out, found.scenario, found.steps)


def _settings(found: argparse.Namespace) -> int:
    from recycle_plugin.settings.schema import reference

    print(reference())
    return 0


if __name__ == "__main__":
    sys.exit(main())
