"""How many descriptors the processes of a job need, and how many they may have.

All of a host's inherit one limit, so the largest need counts, and each grows with the job:

* a worker has, for each other one, a connection of Gloo's in the membership in force and in the one before, and one
  each way for boundary tensors;
* the supervisor of rank 0 has, at the coordinator, the connection of each worker and of each supervisor, and of those
  that ask where they are placed; the launcher for one host has, for each worker, its connection, two descriptors for
  its supervisor's, and one for the process;
* the store's process has what each worker opens there, with DeepSpeed about four; the one that workers are forked from
  has two for each of its forks.
"""

from __future__ import annotations

import resource

OWN = 64  # of a process, whatever the job: files and libraries, the store, the script's data
EACH = 4  # more for each worker of the job


class TooFewDescriptors(RuntimeError):
    """A process may not open as many files and connections as the job needs; the message says where to get more."""


def needed(workers: int) -> int:
    """How many descriptors a process needs in a job of so many workers."""
    return OWN + EACH * workers


def provide(workers: int) -> None:
    """Raise the limit of this process, and of those that it will start, as far as it may be raised.

    Raises TooFewDescriptors where that is not far enough.
    """
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
