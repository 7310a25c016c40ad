"""Tools that list, inspect, compare, export, copy and prune checkpoints.

Enters: paths or URLs that :mod:`dcp_plugin.storage.open` can open. Leaves: reports and files. The rule: no tool needs a
model, a process group or a GPU, and the memory of a tool does not grow with the checkpoint.
"""
