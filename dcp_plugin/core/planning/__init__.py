"""Assignment of bytes to ranks: the rank that writes each byte, and the ranks that read it.

Input: the chunks that each rank holds (:mod:`local_inventory`) or wants. Output: one plan per rank, and on rank 0 the
:class:`~dcp_plugin.core.planning.global_plan.GlobalPlan`. The rule: this package reads, writes and sends no bytes of
tensors, except in :class:`~dcp_plugin.core.planning.sharing.BroadcastRead`; every byte has exactly one writer.
"""
