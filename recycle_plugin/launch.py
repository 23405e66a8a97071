"""``deepspeed … --module recycle_plugin.launch your_script.py …``: the launcher's per-rank process; or srun's task, ``python -m recycle_plugin.launch``.

DeepSpeed's launcher puts ``--local_rank=N`` before the script's name; it goes behind it here.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from recycle_plugin.runtime.supervisor import main

CONFIG, DEFAULT = "--deepspeed_config", "deepspeed"


def script_command(arguments: list[str]) -> list[str]:
    """The script with its arguments, from what the launcher passes to this module."""
    ranks = [argument for argument in arguments if argument.startswith(("--local_rank", "--local-rank"))]
    script = [argument for argument in arguments if argument not in ranks]
    return script[:1] + ranks + script[1:]


def placement(command: list[str]) -> str:
    """``recycle.placement`` of the config file that the command line names: ranks are given out before the script makes its config.

    What is wrong in the section is said by the workers, who read all of it.
    """
    given = [argument.partition("=")[2] or following for argument, following in zip(command, [*command[1:], ""]) if argument.split("=")[0] == CONFIG]
    try:
        text = Path(given[-1]).read_text()
        if '"placement"' not in text:
            return DEFAULT
        from recycle_plugin.settings import Settings, SECTION  # takes longer to import than all else that a supervisor needs

        settings = Settings.from_section(json.loads(text).get(SECTION))
        return settings.placement if settings.enabled else DEFAULT
    except (IndexError, OSError, ValueError, AttributeError):
        return DEFAULT


if __name__ == "__main__":
    command = script_command(sys.argv[1:])
    if not command or command[0].startswith("-"):
        sys.exit("recycle: error: no training script given: deepspeed … --module recycle_plugin.launch your_script.py …")
    sys.exit(main(command, placement(command)))
