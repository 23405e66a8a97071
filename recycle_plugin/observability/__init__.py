"""What people see of a job: lines on the console, event logs, traces, metrics while it runs; its history and its report
afterwards.
"""
