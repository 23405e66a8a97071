"""How boundary tensors and batches get from worker to worker."""
