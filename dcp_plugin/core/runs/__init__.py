"""Checkpoints of a run: search, quarantine and deletion.

Input: a directory of checkpoints. Output: the newest checkpoint, and the list of all. The rule: a run resumes only from
a complete checkpoint, and no checkpoint is deleted before a newer one is complete.
"""
