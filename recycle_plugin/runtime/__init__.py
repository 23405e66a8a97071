"""Processes, messages and tensors: where plans run for real.  Imports torch, never DeepSpeed.

``processes`` start, fork, watch and end workers, and hold a rank's place for the launcher; ``control`` has the
coordinator's process and each worker's session with it, without torch; ``collectives`` and ``movers`` move tensors
between workers, behind the ports ``link`` and ``mover``; ``devices`` have the port to what tensors are computed on;
``stage`` computes micro-batches, ``state`` is what a step changes and what takes it back, and ``worker`` drives the
program of each step and recovers, behind the ports that an adapter fills (worker/ports.py).
"""
