"""Tensors as memory: the kind of each tensor, the address of its bytes, and the private names of torch for both."""
