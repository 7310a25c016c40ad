"""One load, from an opened checkpoint to filled targets.

Enters: a state, a path and what a partial load asks for. Leaves: the filled objects and a
:class:`~dcp_plugin.records.LoadReport`. The rule: everything that can be checked is checked on all ranks before the
first byte of a target is overwritten, and what does not fit is raised in one error that names all of it.
"""
