"""What an accelerator, and a cluster, are found to do: ``scripts/on_gpu`` and ``scripts/check_cluster``."""
