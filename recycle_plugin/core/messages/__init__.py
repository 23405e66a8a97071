"""What workers, supervisors and the coordinator say to each other, and how it becomes bytes."""
