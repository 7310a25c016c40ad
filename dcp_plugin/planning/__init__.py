"""Which rank writes and which rank reads which bytes.

Enters: what each rank holds (:mod:`local_inventory`) or wants. Leaves: one plan per rank, and on rank 0 the
:class:`~dcp_plugin.planning.global_plan.GlobalPlan`. The rule: no bytes of tensors are read, written or sent here,
except by :class:`~dcp_plugin.planning.sharing.BroadcastRead`; every byte has one writer.
"""
