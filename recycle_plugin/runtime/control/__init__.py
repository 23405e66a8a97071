"""Control messages between processes: connections, heartbeats, a worker's session, and the coordinator's process."""
