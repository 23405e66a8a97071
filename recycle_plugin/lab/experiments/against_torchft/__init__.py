"""Whole replicas that are struck and come back, compared with torchft: same model, same cores, in turns."""
