"""A member of the stage "links" of ``scripts/on_gpu``, over the false NCCL."""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed as dist

from recycle_plugin.lab.gpu import link_worker
from recycle_plugin.runtime.collectives import nccl_door

sys.path.append(str(Path(__file__).parents[2]))
from tests.support.standin import nccl

dist.ProcessGroupNCCL = nccl.ProcessGroupNCCL
nccl_door.unfit = lambda: iter(())
link_worker.main()
