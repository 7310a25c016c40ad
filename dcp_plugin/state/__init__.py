"""Layer 5: adapters between live objects and flat state.

Modules, optimizers and anything with a ``state_dict`` go in, ``{key: tensor | DTensor | ShardedTensor | value}`` comes
out, and the other way round. Keys are fully qualified names of the unwrapped module.
"""

from dcp_plugin.state.annotations import mark_parameters, mark_slots
from dcp_plugin.state.module import apply_module, gather_module
from dcp_plugin.state.optimizer import flatten_optimizer, gather_optimizer, unflatten_optimizer

__all__ = [
    "apply_module",
    "flatten_optimizer",
    "gather_module",
    "gather_optimizer",
    "mark_parameters",
    "mark_slots",
    "unflatten_optimizer",
]
