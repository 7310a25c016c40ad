"""Saves of live objects.

Input: names, and the modules, optimizers, tensors and values of every rank. Output: a published checkpoint, and a
:class:`~dcp_plugin.core.saving.queue.RunningSave`. The stages are in :mod:`~dcp_plugin.core.saving.job`, the records
between them in :mod:`dcp_plugin.core.records`, the threads that run the stages in
:mod:`~dcp_plugin.core.saving.writers`. The rule: a failure on one rank is a value until all ranks meet; then all ranks
raise.
"""
