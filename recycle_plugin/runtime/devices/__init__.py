"""What tensors are computed on: the port, the host, and accelerators."""
