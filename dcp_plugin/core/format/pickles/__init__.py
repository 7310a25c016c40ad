"""Pickles from files that anyone may have written. The rule: no global of a file is imported, and no code of it runs.

- :mod:`~dcp_plugin.core.format.pickles.nodes` unpickles. It makes inert nodes, and calls and hashes nothing.
- :mod:`~dcp_plugin.core.format.pickles.metadata_nodes` reads the nodes of a ``.metadata``.
- :mod:`~dcp_plugin.core.format.pickles.unpickler` makes tensors and values of the nodes of a ``torch.save`` file. Each
  use lists the globals that it accepts, and decides about others by name.
- :mod:`~dcp_plugin.core.format.pickles.walk` is the walk over these nodes, within a budget of memory and time.
- :mod:`~dcp_plugin.core.format.pickles.rebuild` makes objects that only executing code would restore otherwise.

:mod:`~dcp_plugin.core.format.torch_archive` checks and reads the zip around the pickle of a ``torch.save`` file.
"""
