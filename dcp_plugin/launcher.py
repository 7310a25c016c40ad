"""The launch of this process: the variables in which torchrun, srun and mpirun say which rank a process is.

A script that forgets ``init_process_group`` runs as often as there are ranks, each time on its own. Its checkpoints and
reservations record launch and rank, so that a rank notices when it shares a root with another one.
"""

from __future__ import annotations

import functools
import os
import socket
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

_LAUNCHERS = (
    ("torchrun", "RANK", "WORLD_SIZE", ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")),
    ("srun", "SLURM_PROCID", "SLURM_NTASKS", ("SLURM_JOB_ID", "SLURM_STEP_ID")),
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", ("PMIX_NAMESPACE",)),
)
"""Name, the variables for rank and world size, and those that tell one launch from another. The first launcher whose
rank is set is the one that started this process: torchrun may run inside of srun."""
_REQUIRED = {"SLURM_STEP_ID"}
"""Without it a process has the variables of a batch script, which runs once, whatever the number of tasks is."""
_LOCAL = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Launch:
    """One start of several processes, and the rank of one of them."""

    launcher: str
    id: str
    rank: int
    world_size: int

    def rank_in(self, record: object) -> int | None:
        """The other rank of the same launch that made a record; None if it is this rank's, or of another launch.

        Args:
            record: What :func:`launch_record` has returned in some process, read from a file.
        """
        if not isinstance(record, Mapping) or (record.get("launcher"), record.get("id")) != (self.launcher, self.id):
            return None
        rank = record.get("rank")
        return rank if isinstance(rank, int) and rank != self.rank else None


def this_launch() -> Launch | None:
    """The launch of this process; None if it was started alone."""
    for launcher, rank, world_size, names in _LAUNCHERS:
        if rank not in os.environ or world_size not in os.environ:
            continue
        if any(name in _REQUIRED and name not in os.environ for name in names):
            continue
        try:
            found = Launch(launcher, _id(names), int(os.environ[rank]), int(os.environ[world_size]))
        except ValueError:
            return None
        return found if found.world_size > 1 else None
    return None


def _id(names: tuple[str, ...]) -> str:
    values = [os.environ.get(name, "") for name in names]
    # Launches on two hosts may both have the local address as their master, and the default port.
    return " ".join(socket.gethostname() if value in _LOCAL else value for value in values)


def launch_record() -> dict[str, Any]:
    """This process's launch and rank, for a summary or a reservation; empty if it was started alone."""
    launch = this_launch()
    return asdict(launch) if launch is not None else {}


@functools.cache
def warn_without_group(launch: Launch) -> None:
    """Warn once that this process saves and loads on its own, although its launcher has started several."""
    warnings.warn(
        f"{launch.launcher} has started {launch.world_size} processes, and there is no process group: rank "
        f"{launch.rank} saves and loads on its own. If the ranks train together, call "
        f"torch.distributed.init_process_group() first; if each trains by itself, give each a root of its own.",
        stacklevel=2,
    )
