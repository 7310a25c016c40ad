"""Layer 8: saves live objects.

In: names, and the modules, optimizers, tensors and values of every rank. Out: a published checkpoint, and a
:class:`~dcp_plugin.saving.queue.SaveHandle`. The stages, and the records between them, are in
:mod:`~dcp_plugin.saving.job`. The rule: a failure on one rank is a value until all ranks meet; then all raise.
"""
