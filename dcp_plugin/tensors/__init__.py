"""Tensors as memory: of what kind each tensor is, the address of its bytes, and the private names of torch for both."""
