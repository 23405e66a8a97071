"""Schedules and runs to look at: text grid, Gantt picture, loss curves."""
