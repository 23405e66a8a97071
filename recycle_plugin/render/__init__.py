"""Schedules and runs to look at: text grid, Gantt picture, Perfetto trace, loss curves."""
