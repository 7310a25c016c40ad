"""Floor 3: live objects (modules, optimizers, anything with ``state_dict``) to flat keys and back."""

from dcp_plugin.state.module import apply_module, gather_module
from dcp_plugin.state.optimizer import flatten_optimizer, gather_optimizer, unflatten_optimizer
from dcp_plugin.state.replicas import mark_parameters, mark_slots

__all__ = [
    "apply_module",
    "flatten_optimizer",
    "gather_module",
    "gather_optimizer",
    "mark_parameters",
    "mark_slots",
    "unflatten_optimizer",
]
