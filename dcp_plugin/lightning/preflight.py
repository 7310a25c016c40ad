"""When a fit starts: would a checkpoint of it be stored? Found out then, and not after hours, at the first save.

What the training adds to a checkpoint besides tensors is put together and encoded, and nothing is written. Every value
that cannot be stored is named in one error on all ranks.

No code of the user's is asked: hooks and ``state_dict`` methods may count, log or write on that occasion, and stock
calls them for checkpoints alone. So this sees hyper-parameters and the schedules whose ``state_dict`` is torch's; the
rest is left to the first save.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from dcp_plugin._torch import is_tensor
from dcp_plugin.errors import UnsafeCheckpoint
from dcp_plugin.integration.key_names import EXTRA
from dcp_plugin.lightning import layout
from dcp_plugin.lightning.stock_format import Checkpoint
from dcp_plugin.planning.flatten import flatten
from dcp_plugin.planning.save import encode_state

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def is_due(trainer: Trainer) -> bool:
    """Whether this is the start of a fit that will save checkpoints by itself."""
    any_trainer = cast(Any, trainer)
    return any_trainer.state.fn == "fit" and bool(any_trainer.checkpoint_callbacks) and not any_trainer.fast_dev_run


def rehearse(trainer: Trainer, allow_pickle: tuple[str, ...]) -> None:
    """Encode what would be stored besides tensors.

    Raises:
        UnsafeCheckpoint: Naming every value that cannot be stored.
    """
    state = layout.to_state(_extra_of(trainer), allow_pickle)
    leaves, _ = flatten({EXTRA: state[EXTRA]} if state[EXTRA] else {})
    try:
        encode_state({key: value for key, value in leaves.items() if not is_tensor(value)}, allow_pickle)
    except UnsafeCheckpoint as error:
        raise UnsafeCheckpoint(f"the checkpoints of this training could not be saved: {error}") from error


def _extra_of(trainer: Any) -> Checkpoint:
    """What Lightning puts into a checkpoint besides model and optimizers, as far as nobody has to be asked for it."""
    extra: Checkpoint = {}
    for owner in (trainer.lightning_module, trainer.datamodule):
        if owner is not None and owner.hparams:
            extra[owner.CHECKPOINT_HYPER_PARAMS_KEY] = owner.hparams
    if not all(getattr(callback, "save_weights_only", False) for callback in trainer.checkpoint_callbacks):
        schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
        extra["lr_schedulers"] = [one.state_dict() if _is_torch_alone(one) else {} for one in schedules]
    return extra


def _is_torch_alone(schedule: Any) -> bool:
    """Whether its ``state_dict`` is torch's, and asks no other schedule for its own."""
    return str(schedule.state_dict.__module__).startswith("torch.") and not hasattr(schedule, "_schedulers")
