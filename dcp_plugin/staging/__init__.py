"""Layer 4: the host copy that makes a save asynchronous.

Live tensors go in, host tensors that nobody changes come out, at once or before the next step of an optimizer.
"""
