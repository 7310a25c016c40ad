"""DLRover's flash checkpoint: an agent beside the training owns the memory that checkpoints are copied to.

It needs ``dlrover`` and ``grpcio``, and no GPU. The agent is what ``dlrover-run`` starts beside a node's processes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

os.environ["DLROVER_LOG_LEVEL"] = "ERROR"

from dlrover.python.elastic_agent.torch.ckpt_saver import AsyncCheckpointSaver
from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

from benchmarks._harness import CONTEXT
from benchmarks._peer import State
from benchmarks._restarts import Place, Way, fill

logging.getLogger().setLevel(logging.WARNING)  # importing it sets INFO, for everybody


def _launched(place: Place) -> None:
    """What ``dlrover-run`` tells its processes."""
    os.environ.update(
        ROLE_NAME="dlrover-trainer", TORCHELASTIC_RUN_ID=f"{place.memory.parent.name}-{place.memory.name}",
        LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_RANK="0", GROUP_WORLD_SIZE="1",
    )  # fmt: skip


def _be_agent(told: Any, place: Place) -> None:
    _launched(place)
    AsyncCheckpointSaver.start_async_saving_ckpt()
    told.send("started")
    told.recv()
    if saver := AsyncCheckpointSaver.get_ckpt_saver():
        saver.close()  # gives the memory back
    os._exit(0)


@contextmanager
def _agent(place: Place) -> Iterator[None]:
    ours, theirs = CONTEXT.Pipe()
    agent = CONTEXT.Process(target=_be_agent, args=(theirs, place), daemon=True)
    agent.start()
    if not ours.poll(60):
        raise SystemExit("DLRover's agent did not start")
    try:
        yield
    finally:
        ours.send("end")
        agent.join(10)
        agent.kill()


def _saver(place: Place) -> DdpCheckpointer:
    _launched(place)
    return DdpCheckpointer(str(place.disk / "dlrover"))


def _save(state: State, place: Place) -> DdpCheckpointer:
    saver = _saver(place)
    saver.save_checkpoint(place.step, dict(state), storage_type=StorageType.MEMORY)
    return saver


def _load(state: State, place: Place) -> None:
    """It hands out views of its memory, which are gone with it; a model takes its values from them."""
    saver = _saver(place)
    fill(state, saver.load_checkpoint())


WAYS = [Way("DLRover flash checkpoint, memory", _save, _load, beside=_agent)]
