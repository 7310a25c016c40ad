"""Layer 4: checkpoints that are spread over the nodes of a job.

A *node* is a host and a ``local_dir`` on it. Each has the part of a checkpoint that its ranks wrote, the whole index,
and maybe copies of other nodes' parts (:mod:`~dcp_plugin.tiers.steps`). In: what each node holds. Out: the files of one
checkpoint, each byte from the nearest place that has it (:mod:`~dcp_plugin.tiers.nearest`,
:mod:`~dcp_plugin.tiers.survey`). The rule: nothing is believed for its name. A file counts if the index of the save
names it and it has its size, and its bytes count if they have their checksums.
"""
