"""Process groups that can lose members: the torch.distributed backend, its links, and the calls open to scripts."""
