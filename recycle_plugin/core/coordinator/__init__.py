"""The coordinator's half of the protocol, as state machines without clock, threads or sockets."""
