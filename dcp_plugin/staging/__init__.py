"""The host copy that makes a save asynchronous.

Enters: live tensors. Leaves: host tensors that nobody changes, at once or before the next step of an optimizer. The
rule: a copy that may mix two states fails its save.
"""
