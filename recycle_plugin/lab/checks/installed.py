"""The releases that a process computes with, including its device's driver."""

from __future__ import annotations

import platform
import subprocess

import torch

from recycle_plugin.runtime.collectives.nccl_door import loaded_release
from recycle_plugin.versions import releases

ASK = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
NONE = "none"


def installed(kind: str) -> dict[str, str]:
    """Return {name: release} of what a worker on a device of this ``kind`` needs."""
    cuda = kind == "cuda"
    return {
        "python": platform.python_version(),
        **{release.name: release.installed or "not installed" for release in releases()},
        "cuda": torch.version.cuda or NONE,
        "nccl": ".".join(map(str, loaded_release() or (NONE,))) if cuda else NONE,
        "driver": first_line(*ASK) if cuda else NONE,
    }


def name_of(device: torch.device) -> str:
    """Return the name of a device's model, or else its kind."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def first_line(*command: str) -> str:
    """Return the first line that a command prints within 30 s, or "unknown"."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else "unknown"
