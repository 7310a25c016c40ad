"""State of a training: its models as users' hooks leave them, and all that is no model and no optimizer.

| name                        | value                                                                   |
|-----------------------------|-------------------------------------------------------------------------|
| ``extra.accelerate``        | step, iteration                                                         |
| ``extra.schedulers.N``      | see :class:`RestoringSchedule`                                          |
| ``extra.dataloaders.N``     | see :mod:`dcp_plugin.accelerate.dataloader_state`                       |
| ``extra.datasets.N.RANK``   | the state of stateful loaders over datasets with a position of their own |
| ``extra.registered.N``      | an object of ``register_for_checkpointing``                             |
| ``extra.scaler``            | the gradient scaler                                                     |
| ``extra.rng.RANK.streams``  | the random generators of each rank                                      |

The state is saved, and restored on any number of processes. A checkpoint from another integration has other extra
state. Objects without stored state keep their current state, and a message names them.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DistributedType
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from dcp_plugin.accelerate import _accelerate
from dcp_plugin.accelerate.dataloader_state import Tracker
from dcp_plugin.core.errors import CheckpointMismatch
from dcp_plugin.core.paths import Where
from dcp_plugin.core.ranks.collectives import Ranks, by_text, name_of
from dcp_plugin.core.state import CleanNames, NamesOnly, contains_fsdp1, groups_of, loose_module
from dcp_plugin.core.tensors._torch import DTensor
from dcp_plugin.integration import (
    EXTRA,
    MODEL,
    OPTIM,
    RNG,
    Callbacks,
    RandomStreams,
    SavedStreams,
    holds_sharded,
    names_for,
    numbered,
    of_rank,
)


@dataclass(frozen=True)
class Training:
    """Models, optimizers and other objects of a checkpoint that an accelerator trains now."""

    models: dict[str, nn.Module]
    optimizers: dict[str, torch.optim.Optimizer]
    registered: list[Any]
    """Objects of ``register_for_checkpointing`` that are neither a model nor an optimizer of the training."""
    sharded: bool  # True if Accelerate itself shards the models (FSDP); stock then saves them in formats of its own
    of_hooks: dict[str, nn.Module]  # the models in the lists of users' hooks

    @classmethod
    def of(cls, accelerator: Accelerator) -> Training:
        """Return the prepared models and optimizers, and those that the user has sharded and only registered. A
        registered module counts as a model if an optimizer trains it."""
        registered = _accelerate.registered_objects(accelerator)
        optimizers = _accelerate.optimizers(accelerator)
        optimizers += [value for value in registered if isinstance(value, torch.optim.Optimizer)]
        trained = {id(p) for optimizer in optimizers for group in groups_of(optimizer) for p in group["params"]}
        models = list(_accelerate.models(accelerator))
        prepared = {id(model) for model in models}
        models += [value for value in registered if id(value) not in prepared and _has_any(value, trained)]
        live = {id(value) for value in (*models, *optimizers)}
        named = dict(zip(numbered(MODEL, len(models)), models, strict=True))
        sharded = accelerator.distributed_type == DistributedType.FSDP
        return cls(
            named,
            dict(zip(numbered(OPTIM, len(optimizers)), optimizers, strict=True)),
            [value for value in registered if id(value) not in live],
            sharded,
            {name: model for name, model in named.items() if id(model) in prepared and not sharded},
        )

    @property
    def is_replicated(self) -> bool:
        """True if every rank has the complete models."""
        return not self.sharded and not any(map(_has_shards, self.models.values()))

    @property
    def shared_names(self) -> dict[str, NamesOnly]:
        """Modules that give names to the parameters of an optimizer that trains several models, or parameters that were
        never prepared. Accelerate saves the state of such an optimizer without names."""
        names = {"names_for_all": NamesOnly(nn.ModuleDict(self.models))} if len(self.models) > 1 else {}
        if not self.is_replicated:
            return names  # unknown parameters probably mean that the optimizer was made before the model was sharded
        for name, optimizer in self.optimizers.items():
            trained = {id(p) for group in groups_of(optimizer) for p in group["params"]}
            if not any(_has_any(model, trained) for model in self.models.values()):
                names[f"names_for_{name}"] = NamesOnly(loose_module(optimizer))
        return names


def run_save_hooks(accelerator: Accelerator, training: Training, directory: Path) -> dict[str, Any]:
    """Run the save hooks. Return the models to save by name, and modules that only name parameters.

    Stock saves the list of state dicts that the hooks leave. Here a state dict that has the values of its model is
    saved from the model, so its tensors may be copied later. Any other is saved as it stands, and a model without a
    state dict is not saved. Where each rank has the complete models, stock saves those of the main process, whose hooks
    alone may have changed the list; so the other ranks save no model.
    """
    hooks, models = _accelerate.save_hooks(accelerator), training.of_hooks
    if not hooks:
        return dict(training.models)
    weights = {name: accelerator.get_state_dict(model, unwrap=False) for name, model in models.items()}
    # With the values, whose identities no other object gets while they exist.
    before = {name: ({key: id(v) for key, v in state.items()}, [*state.values()]) for name, state in weights.items()}
    left = list(weights.values())
    for hook in hooks:
        hook(_accelerate.models(accelerator), left, str(directory))
    chosen: dict[str, Any] = {name: model for name, model in training.models.items() if name not in models}
    for name, state in _named(weights, left, len(training.models)).items():
        identities = {key: id(value) for key, value in state.items()}
        origin = next((other for other, (own, _) in before.items() if own == identities), None)
        if origin is not None:
            chosen |= {name: models[origin]} if accelerator.is_main_process or not training.is_replicated else {}
        elif own := {key: v for key, v in state.items() if accelerator.is_main_process or holds_sharded(v)}:
            clean = CleanNames(models[name]) if name in models else str
            chosen[name] = Callbacks(partial(dict, {clean(key): value for key, value in own.items()}))
    return chosen | names_for(training.models, chosen.values())


def run_load_hooks(
    accelerator: Accelerator, training: Training, checkpoint: AbstractContextManager[Path]
) -> dict[str, nn.Module]:
    """Run the load hooks. Return the models to load by name: those in the list of the hooks, in its order, and those
    that hooks do not see.

    Args:
        checkpoint: Gives a local directory with the checkpoint; entered only if there are hooks.
    """
    left = list(training.of_hooks.values())
    if hooks := _accelerate.load_hooks(accelerator):
        with checkpoint as directory:
            for hook in hooks:
                hook(left, str(directory))
    return _named(training.of_hooks, left, len(training.models)) | {
        name: model for name, model in training.models.items() if name not in training.of_hooks
    }


def _named(before: Mapping[str, Any], left: list[Any], models: int) -> dict[str, Any]:
    """Return the items that hooks have left in a list by name. An item that was there keeps its name; others take the
    names that are free then, and further names.

    Args:
        models: Number of names that the models of the training have.
    """
    own = {id(item): name for name, item in before.items() if any(item is other for other in left)}
    free = chain(
        [name for name in before if name not in own.values()], (f"{MODEL}_{number}" for number in count(models))
    )
    return {own.pop(id(item), "") or next(free): item for item in left}


def _has_any(value: Any, parameters: set[int]) -> bool:
    return isinstance(value, nn.Module) and any(id(parameter) in parameters for parameter in value.parameters())


def _has_shards(model: nn.Module) -> bool:
    return contains_fsdp1(model) or any(isinstance(parameter, DTensor) for parameter in model.parameters())


def gather(
    accelerator: Accelerator, trackers: list[Tracker], registered: list[Any], step: int, with_rng: bool
) -> dict[str, Any]:
    """Return the extra state of this rank as named state."""
    rank = accelerator.process_index
    extra: dict[str, Any] = {"accelerate": {"step": step, "iteration": accelerator.save_iteration}}
    for number, scheduler in enumerate(_accelerate.schedulers(accelerator)):
        extra[f"schedulers.{number}"] = _state_of(scheduler, accelerator.num_processes)
    for number, tracker in enumerate(trackers):
        if (position := tracker.position(accelerator.step - step)) is not None:
            extra[f"dataloaders.{number}"] = position
        if (own := tracker.own_state()) is not None:
            extra[f"datasets.{number}.{rank}"] = own
    extra.update({f"registered.{number}": value for number, value in enumerate(registered)})
    if accelerator.scaler is not None:
        extra["scaler"] = accelerator.scaler.state_dict()
    if with_rng:
        extra[RNG] = of_rank(rank, accelerator.device)
    return {f"{EXTRA}.{name}": value for name, value in extra.items()}


def to_restore(
    accelerator: Accelerator, trackers: list[Tracker], registered: list[Any], stored: Iterable[str]
) -> tuple[dict[str, Any], list[str]]:
    """Return the targets of the extra state by name, and a list that gets messages for the user during the load.

    Make the targets before the optimizers are loaded, see :class:`RestoringSchedule`.

    Args:
        stored: The keys of the checkpoint, without the leading ``extra.``.
    """
    rank, ranks = accelerator.process_index, accelerator.num_processes
    names = {".".join(parts[:depth]) for key in stored for parts in [key.split(".")] for depth in (1, 2, 3)}
    targets, absent = _datasets_to_restore(trackers, names, rank, ranks)
    messages: list[str] = []
    streams = SavedStreams.among(names, rank, ranks, accelerator.device)

    def want(name: str, description: str, target: Any) -> None:
        if name in names:
            targets[name] = target
        else:
            absent.append(description)

    def reporting(load: Callable[[Any], str]) -> Callbacks:
        return Callbacks(load_state_dict=lambda value: messages.append(load(value)))

    want("accelerate", "step", Callbacks(load_state_dict=partial(_set_counters, accelerator)))
    for number, scheduler in enumerate(_accelerate.schedulers(accelerator)):
        description = f"state of the scheduler {type(scheduler.scheduler).__name__}"
        schedule = RestoringSchedule(scheduler, stride(scheduler, ranks))
        present = partial(_state_of, scheduler, ranks)
        want(f"schedulers.{number}", description, Callbacks(present, reporting(schedule.finish).load_state_dict))
    for number, tracker in enumerate(trackers):
        has_own_state = f"datasets.{number}.{rank}" in targets
        resume = partial(tracker.resume, has_own_state=has_own_state, restore_rng=streams.restore)
        want(f"dataloaders.{number}", f"position of {tracker.name}", reporting(resume))
    for number, value in enumerate(registered):
        want(f"registered.{number}", f"state of the registered {type(value).__name__}", value)
    if accelerator.scaler is not None:
        want("scaler", "gradient scaler", accelerator.scaler)
    if streams.name is not None:
        targets[streams.name] = RandomStreams(load_state_dict=streams.restore)
    if absent:
        messages.append(f"it has no {', '.join(absent)}: kept as they are")
    if streams.about_new_ranks:
        messages.append(f"it has {streams.about_new_ranks}")
    return {f"{EXTRA}.{name}": target for name, target in targets.items()}, messages


def _datasets_to_restore(
    trackers: list[Tracker], names: set[str], rank: int, ranks: int
) -> tuple[dict[str, Any], list[str]]:
    """Return targets for the positions of datasets, and descriptions of positions that other processes have saved."""
    targets, absent = {}, []
    for number, tracker in enumerate(trackers):
        saved_on = sum(name.startswith(f"datasets.{number}.") for name in names)
        if saved_on == ranks:
            targets[f"datasets.{number}.{rank}"] = Callbacks(load_state_dict=tracker.resume_dataset)
        elif saved_on:
            absent.append(f"place of {ranks} processes in {tracker.name}")
    return targets, absent


# Start of the keys of a registered object, or its file in a checkpoint of stock Accelerate.
_REGISTERED = re.compile(r"registered\.\d+|custom_checkpoint_\d+\.pkl$")


def refuse_other_registered(
    ranks: Ranks, path: Where, stored: Callable[[], Iterable[str]], registered: list[Any]
) -> None:
    """Refuse a checkpoint with another number of objects than a rank of this run has registered. Collective.

    Args:
        stored: Returns the keys of the checkpoint, without the leading ``extra.``, or the files of stock Accelerate;
            called on rank 0.

    Raises:
        CheckpointMismatch: The numbers differ; the message has what each rank has registered.
    """

    def compare(registered_on: list[list[str]]) -> None:
        saved = len({match[0] for name in stored() if (match := _REGISTERED.match(name))})
        if any(len(kinds) != saved for kinds in registered_on):
            described = {rank: [", ".join(kinds) or "none"] for rank, kinds in enumerate(registered_on)}
            registered_here = "; ".join(f"{kinds} on {name_of(on)}" for kinds, on in by_text(described).items())
            raise CheckpointMismatch(
                f"{path} has {saved} objects given to register_for_checkpointing, and this run has {registered_here}: "
                "register the same ones, in the same order, on every rank"
            )

    kinds = [type(value).__name__ for value in registered]
    ranks.combine(f"compare the registered objects with {path}", lambda: kinds, compare)


def _set_counters(accelerator: Accelerator, saved: dict[str, Any]) -> None:
    accelerator.step = saved["step"]
    accelerator.project_configuration.iteration = saved["iteration"] + 1


SCHEDULED = ("lr", "initial_lr", "max_lr", "min_lr", "momentum", "base_momentum", "max_momentum", "betas")
"""Fields of a param group that schedules set."""


def stride(scheduler: AcceleratedScheduler, num_processes: int) -> int:
    """Return the number of steps of the schedule per optimizer step."""
    return 1 if scheduler.split_batches or not scheduler.step_with_optimizer else num_processes


def _state_of(scheduler: AcceleratedScheduler, num_processes: int) -> dict[str, Any]:
    return {"state": scheduler.state_dict(), "stride": stride(scheduler, num_processes)}


@dataclass
class RestoringSchedule:
    """One schedule during the load of a checkpoint, on any number of processes.

    Accelerate steps a schedule once per process at every optimizer step, and users give the schedule a horizon in these
    units (``num_training_steps * num_processes``). With another number of processes the same position means another
    moment of the training. The load preserves the moment: a schedule saved after 30 optimizer steps on 4 processes
    (position 120) continues at position 60 on 2 processes, with the horizon that the script set for 2. No schedule
    computes its state at a position directly, and many compute a value from the previous one. The load therefore steps
    a fresh schedule up to the position.

    Make this object before the optimizer is loaded: that load overwrites the rates from which the schedule starts.
    """

    scheduler: AcceleratedScheduler
    stride: int

    def __post_init__(self) -> None:
        inner = self.scheduler.scheduler
        self._fresh = getattr(inner, "last_epoch", None) == 0 and not isinstance(inner, ReduceLROnPlateau)
        groups = inner.optimizer.param_groups if self._fresh else []
        self._rates = [{field: group[field] for field in SCHEDULED if field in group} for group in groups]

    def finish(self, saved: dict[str, Any]) -> str:
        """Set the schedule to the saved moment. Return a message for the user, if any."""
        inner, state, stride = self.scheduler.scheduler, saved["state"], saved["stride"]
        name = type(inner).__name__
        if stride == self.stride:
            inner.load_state_dict(state)
            return ""
        if not self._fresh:
            inner.load_state_dict(state)
            return (
                f"{name} goes on at position {state.get('last_epoch')}, counted in steps of {stride} per optimizer "
                f"step; it is now stepped {self.stride} times: a schedule on a metric, or one that has already been "
                "stepped, cannot be converted"
            )
        position = state["last_epoch"] * self.stride // stride
        for group, rates in zip(inner.optimizer.param_groups, self._rates, strict=True):
            group.update(rates)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "call optimizer.step() before lr_scheduler.step()"
            for _ in range(position):
                inner.step()
        return f"{name} goes on at position {position} instead of {state['last_epoch']}, which is the same moment"
