"""Comparisons of plans: an oracle, and many cases."""
