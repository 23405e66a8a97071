"""What a GPU is found to do: ``scripts/on_gpu``."""
