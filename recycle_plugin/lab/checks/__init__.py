"""Trials of a cluster: ``scripts/check_cluster``."""
