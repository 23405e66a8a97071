"""Process groups whose members may go: the torch.distributed backend, its links, and what its users may call."""
