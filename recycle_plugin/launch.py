"""``deepspeed … --module recycle_plugin.launch your_script.py …``: the launcher's per-rank process.

The launcher puts ``--local_rank=N`` before the script's name; it goes behind it here.
"""

from __future__ import annotations

import sys

from recycle_plugin.runtime.supervisor import main


def script_command(arguments: list[str]) -> list[str]:
    """The script with its arguments, from what the launcher passes to this module."""
    ranks = [argument for argument in arguments if argument.startswith(("--local_rank", "--local-rank"))]
    script = [argument for argument in arguments if argument not in ranks]
    return script[:1] + ranks + script[1:]


if __name__ == "__main__":
    command = script_command(sys.argv[1:])
    if not command or command[0].startswith("-"):
        sys.exit("recycle: error: no training script given: deepspeed … --module recycle_plugin.launch your_script.py …")
    sys.exit(main(command))
