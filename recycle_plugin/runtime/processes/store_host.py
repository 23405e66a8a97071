"""Hosts the job's key-value store in a process that outlives the workers.

``python -m recycle_plugin.runtime.processes.store_host FD``: FD is a listening socket of the supervisor, so the
port is known, and connections queue, before torch has been imported here.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

from recycle_plugin.runtime.processes import signal_info


def main(descriptor: int) -> None:
    """Host the store on the listening socket ``descriptor`` until SIGTERM, or until this process's parent is gone."""
    parent = os.getppid()
    host, port = socket.socket(fileno=os.dup(descriptor)).getsockname()[:2]
    from torch.distributed import TCPStore

    store = TCPStore(host, port, None, True, wait_for_workers=False, master_listen_fd=descriptor)
    while os.getppid() == parent:  # the supervisor ends this process; this is for the case that it could not
        signal.sigtimedwait({signal.SIGTERM}, 1.0)
    del store


if __name__ == "__main__":
    signal_info.block()  # it has to outlive the workers
    main(int(sys.argv[1]))
