"""Megatron-LM: an unmodified pretraining script whose steps, evaluations and checkpoints the plugin's runtime runs."""
