"""One load, from an opened checkpoint to filled targets.

Input: a state, a path and the rules of a partial load. Output: the filled objects and a
:class:`~dcp_plugin.core.records.LoadReport`. The rule: all checks run on all ranks before the first byte of a target is
overwritten, and a single error names all misfits.
"""
