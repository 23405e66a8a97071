"""What people see of a job: console lines, event logs, traces and metrics during the run; its history and report."""
