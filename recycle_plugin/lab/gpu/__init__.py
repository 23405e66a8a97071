"""Trials of a GPU: ``scripts/on_gpu``."""
