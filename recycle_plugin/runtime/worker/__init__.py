"""What a worker does in a step and between steps, in torch, whatever framework built its model and calls its optimizer
(runtime/worker/ports.py).
"""
