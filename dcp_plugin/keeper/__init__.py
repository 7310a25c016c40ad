"""Layer 9: the keeper, one helper process per node that writes what the ranks of the node have staged.

In: host copies in shared memory, and files that say what is to become of them (:mod:`~dcp_plugin.keeper.spool`).
Out: local parts, copies on other nodes, published checkpoints (:mod:`~dcp_plugin.keeper.node`,
:mod:`~dcp_plugin.keeper.coordinator`). The ranks talk to it through :mod:`~dcp_plugin.keeper.client`. The rule: once
all ranks have handed a save over, no rank is needed any more. Whatever the keeper does can be done again: one that is
started in place of one that died reads the same files and goes on.
"""
