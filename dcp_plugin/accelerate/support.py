"""In which ways of training checkpoints can be made: not those that Accelerate has silently fallen back to."""

from __future__ import annotations

import os

from accelerate import Accelerator
from accelerate.utils import DistributedType

from dcp_plugin.errors import CheckpointError

_UNSUPPORTED = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)


def refuse_silent_fallbacks(accelerator: Accelerator) -> None:
    """Accelerate trains on, without a word, when it cannot do what it was asked for.

    Raises:
        CheckpointError: It did so, or trains in a way that is not supported.
    """
    kind = accelerator.distributed_type
    if kind in _UNSUPPORTED:
        raise CheckpointError(f"{kind.value} keeps or writes its state in a way of its own, which is not supported.")
    if kind != DistributedType.FSDP and os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        raise CheckpointError(
            f"FSDP was asked for, but Accelerate has silently fallen back to {kind.value}: each process has the whole "
            f"model. It does so on CPUs (cpu=True, use_cpu: true). Train on GPUs, or do not ask for FSDP."
        )
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched > 1 and accelerator.num_processes == 1:
        raise CheckpointError(
            f"{launched} processes were launched, but Accelerate trains each on its own, without a word: they would "
            f"all write the same checkpoint. On CPUs pass Accelerator(cpu=True)."
        )
