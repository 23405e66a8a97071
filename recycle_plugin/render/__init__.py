"""Pictures of schedules and runs: text grid, Gantt picture, loss curves."""
