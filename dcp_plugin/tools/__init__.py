"""Tools for people who have checkpoints: look into one, compare two, take one out, make room.

Enters: paths or URLs, of whatever :mod:`dcp_plugin.storage.open` can open. Leaves: reports, and files. The rule: none
needs a model, a process group or a GPU, and the memory that they take does not grow with the checkpoint.
"""
