"""The worker's half of the protocol: its training loop, what it has of unfinished steps, and what it knows of the
coordinator's decisions.
"""
