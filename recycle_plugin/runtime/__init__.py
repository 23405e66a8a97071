"""Processes, messages and tensors: where plans run for real.  Imports torch, never DeepSpeed.

``guard`` holds a rank's place for the launcher; ``supervisor``, which may die beside it (``place``), and
``coordinator`` watch and decide, without torch; ``one_host`` is a launcher that has them all in one process, and
``fork_server`` the process that it forks workers from; ``session`` is a worker's line to them, and ``control`` carries
what they say; ``transport`` and ``group`` move tensors, behind the ports ``mover`` and ``link``; ``device`` is the port
to what they are computed on; ``worker`` has what a worker does in a step, behind the ports that an adapter fills
(worker/ports.py); ``world`` and ``loop`` drive the program of each step and recover.
"""
