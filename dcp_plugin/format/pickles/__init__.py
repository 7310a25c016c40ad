"""Pickles from files that anyone may have written: no global of theirs is imported, and no code of theirs runs.

One class unpickles, :class:`~dcp_plugin.format.pickles.unpickler.Unpickler`. Each use of it lists the globals that it
accepts and refuses any other by name. All opcodes are checked before the unpickler starts: those of ``torch.save`` by
:mod:`~dcp_plugin.format.pickles.follow`, those of ``.metadata`` by :mod:`~dcp_plugin.format.pickles.records`. The zip
around the former is checked by :mod:`~dcp_plugin.format.pickles.archive`.
"""
