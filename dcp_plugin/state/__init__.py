"""Adapters between live objects and flat state.

Input of a save: modules, optimizers, objects with a ``state_dict`` and data. Output: ``{key: tensor | DTensor |
ShardedTensor | value}``. A load converts in the other direction. The rule: keys are fully qualified names of the
unwrapped module, whatever wraps it.
"""

from dcp_plugin.state.annotations import mark_parameters, mark_slots
from dcp_plugin.state.module import apply_module, gather_module, inside_ddp
from dcp_plugin.state.optimizer import (
    OwnLayout,
    flatten_optimizer,
    gather_optimizer,
    groups_of,
    unflatten_optimizer,
)
from dcp_plugin.state.optimizer_load import load_into
from dcp_plugin.tensors._torch_modules import unwrapped_optimizer

__all__ = [
    "OwnLayout",
    "apply_module",
    "flatten_optimizer",
    "gather_module",
    "gather_optimizer",
    "groups_of",
    "inside_ddp",
    "load_into",
    "mark_parameters",
    "mark_slots",
    "unflatten_optimizer",
    "unwrapped_optimizer",
]
