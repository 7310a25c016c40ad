"""The host copy that makes a save asynchronous.

Input: live tensors. Output: host tensors that no training code changes, complete at once or before the next optimizer
step. The rule: a copy that may mix two states fails its save.
"""
