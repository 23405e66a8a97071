"""What a worker does in a step and between steps, in torch, for whatever framework (runtime/worker/ports.py)."""
