"""One load into one optimizer.

Memory is allocated for what the checkpoint has, also where the optimizer has no state yet; it is filled, and then given
to the optimizer, so a load that fails before leaves no trace.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dcp_plugin._torch import ShardedTensor, laid_out_like, shape_of, shard_of, sharded_like, sharded_value
from dcp_plugin._torch_modules import is_of_torch
from dcp_plugin.errors import CheckpointMismatch
from dcp_plugin.format.index import Entry, StoredTensor
from dcp_plugin.planning.flatten import unflatten
from dcp_plugin.planning.local_inventory import LocalSlot
from dcp_plugin.state.module import apply_fsdp1_optimizer, gather_fsdp1_module, gather_fsdp1_optimizer, reshard
from dcp_plugin.state.names import contains_fsdp1, parameters_by_name
from dcp_plugin.state.optimizer import GLOBAL, LiveState, fields_of, group_names, split_key
from dcp_plugin.tensors import OF_ITS_OWN_CLASS
from dcp_plugin.types import KeyPath, Wanted

_OTHERS_ARE_TRAINED = (
    "parameters that are trained now and were not then start with fresh optimizer state, and the state of those that "
    "are not trained now is left out"
)


class OptimizerLoad:
    """One load into one optimizer: allocate what the checkpoint has, read into that, then swap it in.

    Args:
        stored: The entries of the checkpoint by key relative to the optimizer (``state.<FQN>.<slot>`` …).
        paths: The path of each key, relative too; without it, no group list is recognised.

    Making one is collective if the module contains FSDP1.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        stored: Mapping[str, Entry],
        paths: Mapping[str, KeyPath] | None = None,
    ) -> None:
        self._module = module
        self._optimizer = optimizer
        self._fsdp1 = contains_fsdp1(module)
        reshard(module)
        self._live = LiveState({}, {}, [], {}, False) if self._fsdp1 else LiveState.of(module, optimizer)
        self._global: dict[str, Entry] = {}
        self._paths = dict(paths or {})
        # What has the shape of a parameter is sharded like it.
        self._layouts = gather_fsdp1_module(module) if self._fsdp1 else parameters_by_name(module)
        self._groups = group_names(module, optimizer)
        self._here = {fqn for names in self._groups for fqn in names}
        self._slots: dict[str, dict[str, Entry]] = defaultdict(dict)
        self._hyper: dict[str, dict[str, Entry]] = defaultdict(dict)
        self._group_list: dict[str, Entry] = {}
        self._local: dict[tuple[str, str], list[tuple[LocalSlot, str]]] = defaultdict(list)
        self.wanted = Wanted()
        """Without targets, until they are made."""
        for key, entry in stored.items():
            kind, fqn, name = self._split(key)
            if kind == GLOBAL:
                self._global[key] = entry
            elif kind == "state" and (local := LocalSlot.parse(name)) is not None:
                self._local[fqn, local.slot].append((local, key))
            elif kind == "state":
                self._slots[fqn][name] = entry
            elif any(isinstance(part, int) for part in (paths or {}).get(key, ())):
                self._group_list[key] = entry
            else:
                self._hyper[fqn][name] = entry
        for (fqn, slot), found in self._local.items():
            if fqn in self._here:
                self._take_local(fqn, slot, found, stored)
        known = set(self._slots) | set(self._hyper) | {fqn for fqn, _ in self._local}
        listed_only = bool(self._group_list) and not self._hyper  # then it is not known which parameters there were
        if not listed_only:
            self.wanted.missing = [f"param_groups.{fqn}" for fqn in sorted(self._here - known)]
        self.wanted.unexpected = [f"param_groups.{fqn}" for fqn in sorted(known - self._here)]
        if stored and (not known or known & self._here):  # else it is the state of another optimizer
            self.wanted.tolerated = _OTHERS_ARE_TRAINED
        if self._hyper:
            self._group_list = {}

    def _take_local(self, fqn: str, slot: str, found: list[tuple[LocalSlot, str]], stored: Mapping[str, Entry]) -> None:
        """What this rank itself had for its part of a parameter, else what another rank had for the same part."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        shape = sharded_value(self._layouts[fqn]).shape
        box = shard_of(self._layouts[fqn]) or ((0,) * len(shape), shape)
        fitting = [(local.rank != rank, key) for local, key in found if local.box == box]
        if fitting:
            _, self.wanted.stored_as[f"state.{fqn}.{slot}"] = min(fitting)
            self._slots[fqn][slot] = stored[self.wanted.stored_as[f"state.{fqn}.{slot}"]]
        else:  # a rank without a part of the parameter needs none of its state
            (self.wanted.lost if box != ((), ()) else self.wanted.for_other_ranks).append(f"state.{fqn}.{slot}")

    def targets(self) -> dict[str, Any]:
        """A tensor to fill, or None for another value, by relative key."""
        targets = self.wanted.targets
        for fqn in sorted(self._here):
            for slot, entry in self._slots.get(fqn, {}).items():
                key = f"state.{fqn}.{slot}"
                if isinstance(entry, StoredTensor):
                    existing = laid_out_like(self._live.slots.get(fqn, {}).get(slot), self._layouts[fqn])
                    usable = isinstance(existing, torch.Tensor) and shape_of(existing) == entry.shape
                    targets[key] = existing if usable else self._allocate(fqn, entry, own=key in self.wanted.stored_as)
                    if entry.stored_whole and not usable and not sharded_value(targets[key]).stored_whole:
                        self.wanted.refused[key] = f"{OF_ITS_OWN_CLASS}, and not there yet: {_HAVE_STATE}"
                else:
                    targets[key] = None
            for field, entry in self._hyper.get(fqn, {}).items():
                targets[f"param_groups.{fqn}.{field}"] = _target_for(entry)
        targets.update({key: _target_for(entry) for key, entry in {**self._group_list, **self._global}.items()})
        return targets

    def check(self, values: Mapping[str, Any]) -> None:
        """Check that the hyper-parameters fit the groups.

        Raises:
            CheckpointMismatch: Parameters of one group here have different hyper-parameters in the checkpoint.
        """
        _, fields = self._sort(values)
        for number, names in enumerate(self._groups):
            self._group_fields(number, names, fields)

    def commit(self, filled: Mapping[str, Any]) -> None:
        """Give the optimizer what was read; parameters of which nothing was read keep what they have.

        Collective if the module contains FSDP1.

        Raises:
            CheckpointMismatch: Parameters of one group here have different hyper-parameters in the checkpoint.
        """
        state, fields = self._sort(filled)
        touched = state.keys() | fields.keys()
        groups = [self._group_fields(number, names, fields) for number, names in enumerate(self._groups)]
        if self._fsdp1:
            nested_groups = [
                {**fields_of(group), **new, "params": names}
                for group, new, names in zip(self._optimizer.param_groups, groups, self._groups, strict=True)
            ]
            if touched != self._here:
                now = gather_fsdp1_optimizer(self._module, self._optimizer)["state"]
                state = {**{fqn: slots for fqn, slots in now.items() if fqn not in touched}, **state}
            apply_fsdp1_optimizer(self._module, self._optimizer, {"state": state, "param_groups": nested_groups})
            return
        slots: dict[str, dict[str, Any] | None] = {}
        for fqn in touched & self._here:
            if fqn in state:
                kept = {} if self._is_complete(fqn, state[fqn]) else self._live.slots.get(fqn, {})
                slots[fqn] = {**kept, **state[fqn]}
            elif fqn not in self._slots:  # it never got a gradient before the checkpoint
                slots[fqn] = None
        self._live.load(self._optimizer, slots, self._global_of(filled), groups)

    def _is_complete(self, fqn: str, slots: Mapping[str, Any]) -> bool:
        """Whether this is all that the checkpoint has of a parameter's state."""
        lost = any(key.startswith(f"state.{fqn}.") for key in self.wanted.lost)
        return slots.keys() == self._slots[fqn].keys() and not lost

    def _global_of(self, filled: Mapping[str, Any]) -> dict[Any, Any]:
        """The state that is of no parameter, with what was not read as it is."""
        if GLOBAL in filled:
            return dict(filled[GLOBAL])
        read = {key: filled[key] for key in self._global if key in filled}
        tree: dict[Any, Any] = unflatten(read, self._paths)[GLOBAL] if read else {}
        return _merged(self._live.others, tree) if len(read) < len(self._global) else tree

    def _sort(self, filled: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
        """Slots and hyper-parameters by FQN."""
        state: dict[str, dict[str, Any]] = defaultdict(dict)
        fields: dict[str, dict[str, Any]] = defaultdict(dict)
        listed: dict[str, dict[str, Any]] = defaultdict(dict)
        for key, value in filled.items():
            kind, fqn, name = self._split(key)
            if kind == GLOBAL:
                continue
            where = state if kind == "state" else listed if key in self._group_list else fields
            where[fqn][name] = value
        for group in listed.values():
            for fqn in group.get("params", ()):
                fields[fqn] = fields_of(group)
        return state, fields

    def _split(self, key: str) -> tuple[str, str, str]:
        """Like :func:`split_key`, and right for slots with dots in their names if the parameter is known here."""
        kind, fqn, name = split_key(key)
        parts = fqn.split(".")
        for count in range(len(parts), 0, -1):
            known = ".".join(parts[:count])
            if known in self._here:
                return kind, known, ".".join([*parts[count:], name])
        return kind, fqn, name

    def _allocate(self, fqn: str, entry: StoredTensor, own: bool) -> Any:
        """A tensor for a slot that the optimizer does not have yet: laid out like the parameter if it has its shape
        and is not this rank's own."""
        like = self._layouts[fqn]
        if entry.shape == sharded_value(like).shape and not own:  # a ShardedTensor warns when asked for its size
            dtype = self._dtype_of_slot(entry.dtype, like)
            if isinstance(like, ShardedTensor):
                local = [torch.empty_like(shard.tensor, dtype=dtype) for shard in like.local_shards()]
                return sharded_like(like, local)
            return laid_out_like(torch.empty_like(like.detach(), dtype=dtype, requires_grad=False), like)
        on_device = entry.shape != () or self._steps_on_device(fqn)
        return torch.empty(entry.shape, dtype=entry.dtype, device=like.device if on_device else "cpu")

    def _dtype_of_slot(self, stored: torch.dtype, like: Any) -> torch.dtype:
        """Torch's own optimizers want state of the dtype of the parameter, which may have been another at the save.
        What others have is theirs: 8 bits beside 32, say."""
        cast = is_of_torch(self._optimizer) and stored.is_floating_point and like.dtype.is_floating_point
        return like.dtype if cast else stored

    def _steps_on_device(self, fqn: str) -> bool:
        """Optimizers keep scalars such as ``step`` on the host, unless they are fused or capturable."""
        groups = zip(self._optimizer.param_groups, self._groups, strict=True)
        return any(group.get("fused") or group.get("capturable") for group, names in groups if fqn in names)

    @staticmethod
    def _group_fields(number: int, names: list[str], fields: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        merged: dict[str, tuple[str, Any]] = {}
        for fqn in names:
            for field, value in fields.get(fqn, {}).items():
                source, known = merged.setdefault(field, (fqn, value))
                if repr(known) != repr(value):
                    raise CheckpointMismatch(
                        f"param group {number} holds {source} and {fqn}, which had different {field} in the "
                        f"checkpoint ({known} and {value}). Give the optimizer the groups it was saved with."
                    )
        return {field: value for field, (_, value) in merged.items()}


_HAVE_STATE = (
    "let the optimizer take one step first (torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(module, "
    "optimizer) lets it take one that changes nothing)"
)


def _merged(current: Mapping[Any, Any], new: Mapping[Any, Any]) -> dict[Any, Any]:
    """The current tree, with leaves replaced by those of the new one."""
    result = dict(current)
    for key, value in new.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = _merged(result[key], value) if both else value
    return result


def _target_for(entry: Entry) -> torch.Tensor | None:
    return torch.empty(entry.shape, dtype=entry.dtype) if isinstance(entry, StoredTensor) else None
