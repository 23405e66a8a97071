"""The coordinator's half of the protocol: who is alive, which steps are committed, how the job ends. State machines
without clock, threads or sockets.
"""
