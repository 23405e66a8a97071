"""The jobs that scripts/train_gpt.py trains: GPTs of Megatron-LM and emulated layers, as Hydra composes them."""
