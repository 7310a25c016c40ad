"""Assignment of bytes to ranks: the rank that writes each byte, and the ranks that read it.

Input: the chunks that each rank holds (:mod:`~dcp_plugin.core.planning.local_inventory`) or wants. Output: one plan per
rank, and on rank 0 the :class:`~dcp_plugin.core.planning.global_plan.GlobalPlan`.

The rule: every byte has exactly one writer. The modules of this folder plan, and change no tensor. There are two
exceptions to that: :class:`~dcp_plugin.core.planning.sharing.BroadcastRead` sends bytes that one rank has read to other
ranks, and :mod:`~dcp_plugin.core.planning.replicas` reads a few elements to compare them.
"""
