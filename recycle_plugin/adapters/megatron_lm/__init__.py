"""Megatron-LM: the plugin's runtime runs an unmodified pretraining script's steps, evaluations and checkpoints."""
