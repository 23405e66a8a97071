"""Whole replicas that are struck and come back, beside torchft's: the same model, on the same cores, in turns."""
