"""Tensors as memory: the kind of each tensor, the address of its bytes, and torch's private names for both."""
