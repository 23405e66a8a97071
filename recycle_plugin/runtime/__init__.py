"""Processes, messages and tensors: where plans run for real.  Imports torch, never DeepSpeed.

``supervisor`` and ``coordinator`` watch and decide, without torch; ``session`` is a worker's line to
them, and ``control`` carries what they say; ``transport`` and ``group`` move tensors; ``stage`` computes; ``world`` and ``loop`` drive the
program of each step and recover.
"""
