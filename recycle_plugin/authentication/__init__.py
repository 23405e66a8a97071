"""Who may take part in a job: its secret, each port's handshake, and seals on what is said after it.  No torch."""
