"""The processes of a job: guards, supervisors, a fork server, how each is started, told of signals, and ends."""
