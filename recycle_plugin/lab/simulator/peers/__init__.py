"""Policies of other fault-tolerant systems, and ours, under the same traces: one file per policy, which names its
source. ``published`` holds others' figures as data. A policy with an empty ``validated`` has no check against published
figures, and is called unvalidated wherever it appears.
"""

from __future__ import annotations

from recycle_plugin.lab.simulator.peers.bamboo import Bamboo
from recycle_plugin.lab.simulator.peers.checkfreq import CheckFreq
from recycle_plugin.lab.simulator.peers.elastic_batching import ElasticBatching
from recycle_plugin.lab.simulator.peers.elastic_horovod import ElasticHorovod
from recycle_plugin.lab.simulator.peers.fault_scaled import FaultScaled
from recycle_plugin.lab.simulator.peers.oobleck import Oobleck
from recycle_plugin.lab.simulator.peers.peer_job import PeerJob, Transitions
from recycle_plugin.lab.simulator.peers.policy import (
    PeerPolicy,
    PeerTransition,
    Run,
    WorkersChange,
    changes_of,
    label,
    regular_losses,
    replay,
)
from recycle_plugin.lab.simulator.peers.recycle import Recycle
from recycle_plugin.lab.simulator.peers.restart_from_checkpoint import RestartFromCheckpoint

__all__ = [
    "Bamboo",
    "CheckFreq",
    "ElasticBatching",
    "ElasticHorovod",
    "FaultScaled",
    "Oobleck",
    "PeerJob",
    "PeerPolicy",
    "PeerTransition",
    "Recycle",
    "RestartFromCheckpoint",
    "Run",
    "Transitions",
    "WorkersChange",
    "changes_of",
    "label",
    "regular_losses",
    "replay",
]
