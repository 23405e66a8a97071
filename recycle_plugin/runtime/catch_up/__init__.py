"""Lines between workers on which a stage's state goes to a newcomer, beside the training."""
