"""Pickles from files that anyone may have written: no global of theirs is imported, and no code of theirs runs.

:mod:`~dcp_plugin.core.format.pickles.nodes` unpickles: it makes inert nodes, and calls and hashes nothing. What these
become depends on the use. :mod:`~dcp_plugin.core.format.pickles.metadata_nodes` reads the nodes of a ``.metadata``.
:mod:`~dcp_plugin.core.format.pickles.unpickler` makes tensors and values of those of ``torch.save``, in one walk within
a budget (:mod:`~dcp_plugin.core.format.pickles.walk`); each use lists the globals that it accepts, and refuses any
other by name. The zip around the latter is checked by :mod:`~dcp_plugin.core.format.torch_archive`.
"""
