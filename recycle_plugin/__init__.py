"""Fault-tolerant pipeline-parallel training as a plugin for DeepSpeed and Megatron-LM.

Importing this package imports neither torch nor DeepSpeed.  Layers, top to bottom, each importing
only what stands below it::

    adapters/    deepspeed, megatron: one framework each, no algorithm
    runtime/     processes, messages and tensors          simulator/  the same loop in virtual time
    render/      text grid, Gantt picture, trace
    planner/     reroute, schedule, bounds, verify
    core/        vocabulary, dependencies, plan, executor, membership (standard library only)
"""

__version__ = "0.1.0"
