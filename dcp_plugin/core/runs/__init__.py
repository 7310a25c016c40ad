"""Checkpoints of a run: search, quarantine and deletion.

Input: a directory of checkpoints. Output: the newest checkpoint, and the list of all. Two rules: a run resumes from a
complete checkpoint or not at all, and no checkpoint is deleted before a newer one is complete.
"""
