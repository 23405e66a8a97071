"""DeepSpeed: an engine that runs plans, and the entry into an unmodified training script."""

from recycle_plugin.adapters.deepspeed.entry import Plugin

__all__ = ["Plugin"]
