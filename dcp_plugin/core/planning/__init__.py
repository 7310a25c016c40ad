"""Assignment of bytes to ranks: the rank that writes each byte, and the ranks that read it.

Input: the chunks that each rank holds (:mod:`~dcp_plugin.core.planning.local_inventory`) or wants. Output: one plan per
rank, and on rank 0 the :class:`~dcp_plugin.core.planning.global_plan.GlobalPlan`.

The rule: every byte has exactly one writer. This package writes no bytes of tensors. It sends them in
:class:`~dcp_plugin.core.planning.sharing.BroadcastRead` alone, and reads a few to compare replicas
(:mod:`~dcp_plugin.core.planning.replicas`).
"""
