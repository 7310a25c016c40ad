"""What an accelerator trains: the models, optimizers and other objects that belong into a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from dcp_plugin._torch import DTensor
from dcp_plugin.accelerate import _accelerate
from dcp_plugin.integration.key_names import MODEL, OPTIM, numbered
from dcp_plugin.state.adapters import NamesOnly
from dcp_plugin.state.names import contains_fsdp1, loose_module


@dataclass(frozen=True)
class Training:
    """The objects of an accelerator at this moment."""

    models: dict[str, nn.Module]
    optimizers: dict[str, torch.optim.Optimizer]
    registered: list[Any]
    """Given to ``register_for_checkpointing``, and neither a model nor an optimizer of the training."""
    sharded: bool
    """Accelerate knows that it is: then it has formats and habits of its own."""

    @classmethod
    def of(cls, accelerator: Accelerator) -> Training:
        """Models and optimizers may be prepared, or sharded by the user and registered only: a registered module is a
        model if an optimizer trains it."""
        given = _accelerate.registered_objects(accelerator)
        optimizers = _accelerate.optimizers(accelerator)
        optimizers += [one for one in given if isinstance(one, torch.optim.Optimizer)]
        trained = {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}
        models = list(_accelerate.models(accelerator))
        known = {id(one) for one in models}
        models += [one for one in given if id(one) not in known and _has_any(one, trained)]
        live = {id(one) for one in (*models, *optimizers)}
        return cls(
            dict(zip(numbered(MODEL, len(models)), models, strict=True)),
            dict(zip(numbered(OPTIM, len(optimizers)), optimizers, strict=True)),
            [one for one in given if id(one) not in live],
            accelerator.distributed_type == DistributedType.FSDP,
        )

    @property
    def shared_names(self) -> dict[str, NamesOnly]:
        """What names the parameters of an optimizer that trains several models, or what was never prepared: Accelerate
        saves and loads its state without it."""
        names = {"names_for_all": NamesOnly(nn.ModuleDict(self.models))} if len(self.models) > 1 else {}
        if self.sharded or any(map(_is_sharded, self.models.values())):
            return names  # there it is more likely that the optimizer was made before the model was sharded
        for name, optimizer in self.optimizers.items():
            trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
            if not any(_has_any(model, trained) for model in self.models.values()):
                names[f"names_for_{name}"] = NamesOnly(loose_module(optimizer))
        return names


def _has_any(one: Any, parameters: set[int]) -> bool:
    return isinstance(one, nn.Module) and any(id(parameter) in parameters for parameter in one.parameters())


def _is_sharded(model: nn.Module) -> bool:
    return contains_fsdp1(model) or any(isinstance(parameter, DTensor) for parameter in model.parameters())
