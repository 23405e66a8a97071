"""All that a step changes on a worker, how it is taken back, and who else may change it."""
