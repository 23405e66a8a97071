"""Admission to a job: its secret, each port's handshake, and seals on later messages. No torch."""
