"""How many file descriptors the processes of a job need, and how many they may have.

All processes of a host inherit one limit, so the largest need counts. Each need grows with the job:

* A worker has up to two Gloo connections to each other worker (for the membership in force and the one before), and one
  each way for boundary tensors.
* The coordinator's process has a connection from each worker and each supervisor, and from those that ask for their
  placement. The launcher for one host has, for each worker, the worker's connection, two descriptors for its
  supervisor's, and one for the process.
* The store's process has each worker's connections (about four with DeepSpeed); a fork server has two for each fork.
"""

from __future__ import annotations

import resource

OWN = 64  # per process, for any job: files, libraries, the store, the script's data
EACH = 4  # more for each worker of the job


class TooFewDescriptors(RuntimeError):
    """A process may not open as many files and connections as the job needs; the message says how to allow more."""


def needed(workers: int) -> int:
    """Return how many descriptors a process needs in a job of ``workers`` workers."""
    return OWN + EACH * workers


def provide(workers: int) -> None:
    """Raise the limit of this process and its children as far as possible; TooFewDescriptors if that is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < needed(workers):
        raise TooFewDescriptors(
            f"processes may open no more than {hard} files and connections here, and each needs up to "
            f"{needed(workers)} in a job of {workers} workers "
            f"({OWN}, and {EACH} for each): "
            "raise the hard limit (ulimit -Hn; LimitNOFILE= of a service; --ulimit nofile= of a container), or start "
            "fewer workers"
        )
