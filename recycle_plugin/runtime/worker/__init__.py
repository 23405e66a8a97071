"""What a worker does in a step and between steps, in torch, for whatever framework (runtime/stage/ports.py)."""
