"""The keeper: one helper process per node that writes what the ranks of the node have staged.

In: host copies in shared memory (:mod:`~dcp_plugin.tiers.spool`), and the journal of the saves
(:mod:`~dcp_plugin.tiers.journal`). Out: local parts, copies on other nodes, published checkpoints
(:mod:`~dcp_plugin.tiers.node`, :mod:`~dcp_plugin.tiers.coordinator`). The ranks talk to it through
:mod:`~dcp_plugin.tiers.keeper_client`. :mod:`~dcp_plugin.tiers.wire` makes every request to a keeper, in the encoding
of :mod:`~dcp_plugin.tiers.plain`, and :mod:`~dcp_plugin.tiers.server` answers it. The rule: once all ranks have handed
a save over, no rank is needed any more. Every step of the keeper can be repeated: a keeper that replaces a dead one
reads the same journal and continues.

A *node* is a host and a ``keeper.dir`` on it. It has the part of a checkpoint that its ranks wrote, the complete index,
and perhaps copies of other nodes' parts (:mod:`~dcp_plugin.tiers.local_checkpoints`). A load takes each byte from the
nearest place that has it (:mod:`~dcp_plugin.tiers.source`). A file counts if the index of the save names it and it has
its size, and its bytes count if they have their checksums.

The core sees the writer and the source that :mod:`~dcp_plugin.tiers.registration` registers.
"""
