"""Lines between two processes of a job: framing, seals, and the only way to be let in."""
