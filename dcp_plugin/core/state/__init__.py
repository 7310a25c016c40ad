"""Adapters between live objects and flat state.

Input of a save: modules, optimizers, objects with a ``state_dict`` and data. Output: ``{key: tensor | DTensor |
ShardedTensor | value}``. A load converts in the other direction. The rule: keys are fully qualified names of the
unwrapped module, whatever wraps it.
"""

from dcp_plugin.core.state.adapters import CalledLast, NamesOnly, Unapplied, without_sampler
from dcp_plugin.core.state.module import apply_module, gather_module, gather_with_names, inside_ddp, materialise
from dcp_plugin.core.state.names import (
    CleanNames,
    OwnNames,
    contains_fsdp1,
    is_of_no_module,
    loose_module,
    mark_parameters,
    mark_slots,
    module_cache,
    parameter_names,
    parameters_by_name,
    pruned_names,
    trained_module,
    without_wrappers,
)
from dcp_plugin.core.state.optimizer import (
    BESIDE,
    EXTRA_STATE,
    GROUPS,
    Nested,
    OwnLayout,
    extras_of,
    flatten_optimizer,
    flatten_tree,
    gather_optimizer,
    group_list,
    group_names,
    groups_of,
    unflatten_optimizer,
    with_names,
    with_numbers,
)
from dcp_plugin.core.state.optimizer_load import load_into
from dcp_plugin.core.tensors._torch_modules import unwrapped_optimizer
from dcp_plugin.core.types import PerRank

__all__ = [
    "BESIDE",
    "EXTRA_STATE",
    "GROUPS",
    "CalledLast",
    "CleanNames",
    "NamesOnly",
    "Nested",
    "OwnLayout",
    "OwnNames",
    "PerRank",
    "Unapplied",
    "apply_module",
    "contains_fsdp1",
    "extras_of",
    "flatten_optimizer",
    "flatten_tree",
    "gather_module",
    "gather_optimizer",
    "gather_with_names",
    "group_list",
    "group_names",
    "groups_of",
    "inside_ddp",
    "is_of_no_module",
    "load_into",
    "loose_module",
    "mark_parameters",
    "mark_slots",
    "materialise",
    "module_cache",
    "parameter_names",
    "parameters_by_name",
    "pruned_names",
    "trained_module",
    "unflatten_optimizer",
    "unwrapped_optimizer",
    "with_names",
    "with_numbers",
    "without_sampler",
    "without_wrappers",
]
