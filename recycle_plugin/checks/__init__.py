"""What a cluster is found to do: ``scripts/check_cluster``."""
