"""The name by which a job tells its hosts apart."""

from __future__ import annotations

import socket
from pathlib import Path

BOOT = Path("/proc/sys/kernel/random/boot_id")  # a machine's own since its start


def host_name() -> str:
    """Return this host's name; "localhost", which machines without a name of their own share, with part of the boot's
    identifier: otherwise all hosts would count as one, which dies as a whole.
    """
    name = socket.gethostname()
    return f"{name}-{BOOT.read_text()[:8]}" if name.partition(".")[0] == "localhost" else name
