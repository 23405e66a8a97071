"""What a worker does in a step and between steps, in torch, for any framework (runtime/stage/ports.py)."""
