"""The messages that workers, supervisors and the coordinator exchange, and how they become bytes."""
