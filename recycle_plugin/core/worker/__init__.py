"""The worker's half of the protocol: its training loop, its data of unfinished steps, and its view of the job."""
