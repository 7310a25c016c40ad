"""The checkpoints of a run on disk.

Enters: a directory of checkpoints. Leaves: the newest, the one to resume from, what is in one, whether its bytes are
intact; old ones are deleted. The rule: only a complete checkpoint is resumed from, and none is deleted before a newer
one is complete.
"""
