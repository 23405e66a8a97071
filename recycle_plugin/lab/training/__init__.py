"""The jobs of scripts/train_gpt.py: GPTs of Megatron-LM and emulated layers, as Hydra composes them."""
