"""The Hydra configuration groups, shipped as ``recycle_plugin.configs``."""
