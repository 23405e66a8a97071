"""Lines between two processes of a job: framing, seals, and the one way in which anybody is let in."""
