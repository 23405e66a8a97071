"""Hosts the job's key-value store in a process that outlives workers and coordinators.

``python -m recycle_plugin.runtime.processes.store_host FD LIFE``: FD is a listening socket of the coordinator, so the
port is known and connections queue before torch is imported here. LIFE is a pipe that ends once the store is no longer
wanted, or -1 if this process is killed then.
"""

from __future__ import annotations

import os
import select
import socket
import sys

from recycle_plugin.runtime.processes import signal_info


def main(descriptor: int, life: int) -> None:
    """Host the store on the listening socket ``descriptor`` until the pipe ``life`` ends."""
    host, port = socket.socket(fileno=os.dup(descriptor)).getsockname()[:2]
    from torch.distributed import TCPStore

    store = TCPStore(host, port, None, True, wait_for_workers=False, master_listen_fd=descriptor)
    select.select([life] if life >= 0 else [], [], [])
    del store


if __name__ == "__main__":
    signal_info.block()  # the store has to outlive the workers
    main(int(sys.argv[1]), int(sys.argv[2]))
