"""The state that a step changes on a worker, how a step is taken back, and which other code may change that state."""
