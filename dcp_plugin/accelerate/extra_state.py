"""Everything of a training but its models and optimizers: into a checkpoint, and back on any number of processes.

| name                        | what                                                                    |
|-----------------------------|-------------------------------------------------------------------------|
| ``extra.accelerate``        | step, iteration                                                         |
| ``extra.schedulers.N``      | see :mod:`dcp_plugin.accelerate.schedules`                              |
| ``extra.dataloaders.N``     | see :mod:`dcp_plugin.accelerate.dataloader_state`                              |
| ``extra.datasets.N.RANK``   | the state of stateful loaders over datasets that keep their own place   |
| ``extra.registered.N``      | what was given to ``register_for_checkpointing``                        |
| ``extra.scaler``            | the gradient scaler                                                     |
| ``extra.rng.RANK.streams``  | the random generators of each rank                                      |

A checkpoint from another door has other extras; what is not there keeps its value, and is named.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from accelerate import Accelerator

from dcp_plugin.accelerate import _accelerate, schedules
from dcp_plugin.accelerate.dataloader_state import Tracker
from dcp_plugin.errors import CheckpointMismatch
from dcp_plugin.integration.key_names import EXTRA, RNG
from dcp_plugin.integration.random_streams import SavedStreams, of_rank


def gather(
    accelerator: Accelerator, trackers: list[Tracker], registered: list[Any], step: int, with_rng: bool
) -> dict[str, Any]:
    """The extras of this rank as named state."""
    rank = accelerator.process_index
    extra: dict[str, Any] = {"accelerate": {"step": step, "iteration": accelerator.save_iteration}}
    for number, scheduler in enumerate(_accelerate.schedulers(accelerator)):
        extra[f"schedulers.{number}"] = schedules.capture(scheduler, accelerator.num_processes)
    training_goes_on = any(tracker.running for tracker in trackers)
    for number, tracker in enumerate(trackers):
        if (position := tracker.position(training_goes_on)) is not None:
            extra[f"dataloaders.{number}"] = position
        if (own := tracker.own_state()) is not None:
            extra[f"datasets.{number}.{rank}"] = own
    extra.update({f"registered.{number}": one for number, one in enumerate(registered)})
    if accelerator.scaler is not None:
        extra["scaler"] = accelerator.scaler.state_dict()
    if with_rng:
        extra[RNG] = of_rank(rank, accelerator.device)
    return {f"{EXTRA}.{name}": value for name, value in extra.items()}


class Restoring:
    """The extras of one load: ask for what is there, and when it has been read, put it where it belongs.

    Args:
        stored: The keys of the checkpoint, without the leading ``extra.``.

    Raises:
        CheckpointMismatch: The checkpoint has another number of registered objects.
    """

    def __init__(
        self, accelerator: Accelerator, trackers: list[Tracker], registered: list[Any], stored: Iterable[str]
    ) -> None:
        self._accelerator = accelerator
        self._trackers = trackers
        self._stored = {".".join(parts[:depth]) for key in stored for parts in [key.split(".")] for depth in (1, 2, 3)}
        self._schedules = [
            schedules.Restoring(scheduler, schedules.stride(scheduler, accelerator.num_processes))
            for scheduler in _accelerate.schedulers(accelerator)
        ]
        self._streams = SavedStreams.among(
            self._stored, accelerator.process_index, accelerator.num_processes, accelerator.device
        )
        self._read: dict[str, Any] = {}
        self._absent: list[str] = []
        self._check_registered(registered)
        self._ask_for_all(registered)

    def targets(self) -> dict[str, Any]:
        """What the core has to fill, by name."""
        return {f"{EXTRA}.{name}": target for name, target in self._read.items()}

    def apply(self) -> list[str]:
        """Restore everything from the filled targets. Returns what has to be said about it, the same on all ranks."""
        said = [f"it has no {', '.join(self._absent)}: kept as they are"] if self._absent else []
        accelerator = self._accelerator
        if (about := self._read.get("accelerate")) is not None:
            accelerator.step = about["step"]
            accelerator.project_configuration.iteration = about["iteration"] + 1
        for number, schedule in enumerate(self._schedules):
            if (saved := self._read.get(f"schedulers.{number}")) is not None:
                said.append(schedule.finish(saved))
        if "scaler" in self._read:
            accelerator.scaler.load_state_dict(self._read["scaler"])
        for number, tracker in enumerate(self._trackers):
            if (position := self._read.get(f"dataloaders.{number}")) is not None:
                own = self._read.get(f"datasets.{number}.{accelerator.process_index}")
                said.append(tracker.resume(position, own, self._restore_rng))
        self._restore_rng()
        if self._streams.about_new_ranks:
            said.append(f"it has {self._streams.about_new_ranks}")
        return [message for message in said if message]

    def _check_registered(self, registered: list[Any]) -> None:
        found = sum(name.startswith("registered.") and name.count(".") == 1 for name in self._stored)
        if "accelerate" in self._stored and found != len(registered):
            raise CheckpointMismatch(
                f"the checkpoint has {found} objects given to register_for_checkpointing, this run has "
                f"{len(registered)}: register the same ones, in the same order"
            )

    def _ask_for_all(self, registered: list[Any]) -> None:
        accelerator = self._accelerator
        self._ask("accelerate", "step")
        for number, scheduler in enumerate(_accelerate.schedulers(accelerator)):
            self._ask(f"schedulers.{number}", f"state of the scheduler {type(scheduler.scheduler).__name__}")
        for number, tracker in enumerate(self._trackers):
            self._ask(f"dataloaders.{number}", f"position of {tracker.name}")
            ranks = sum(name.startswith(f"datasets.{number}.") for name in self._stored)
            if ranks == accelerator.num_processes:
                self._ask(f"datasets.{number}.{accelerator.process_index}", "")
            elif ranks:
                self._absent.append(f"place of {accelerator.num_processes} processes in {tracker.name}")
        for number, one in enumerate(registered):
            self._ask(f"registered.{number}", f"state of the registered {type(one).__name__}", one)
        if accelerator.scaler is not None:
            self._ask("scaler", "gradient scaler")
        if self._streams.name is not None:
            self._ask(self._streams.name, "")

    def _ask(self, name: str, said: str, target: Any = None) -> None:
        if name in self._stored:
            self._read[name] = {} if target is None else target
        else:
            self._absent.append(said)

    def _restore_rng(self) -> None:
        if self._streams.name is not None:
            self._streams.restore(self._read[self._streams.name])
