"""The launch of this process, read from the environment variables of torchrun, srun and mpirun.

If a script forgets ``init_process_group``, each rank runs independently, and all may save to the same root. Checkpoints
and reservations record launch and rank, by which a rank detects another rank of its launch in the same root.
"""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dcp_plugin.core.errors import warn

_LAUNCHERS = (
    ("torchrun", ("RANK", "WORLD_SIZE"), ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")),
    ("srun", ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID"), ("SLURM_JOB_ID", "SLURM_STEP_ID")),
    ("mpirun", ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMIX_NAMESPACE",)),
)
"""Launcher, the variables that it sets (rank and world size first), and variables that distinguish launches.

The order matters, since torchrun may run inside of srun: the first launcher whose variables are set is the one that
started this process. ``SLURM_STEP_ID`` is required because a batch script of SLURM has the other variables and no step,
and runs only once for any number of tasks."""
_LOCAL = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Launch:
    """One start of several processes, and the rank of one of them."""

    launcher: str
    id: str
    rank: int
    world_size: int

    def rank_in(self, record: object) -> int | None:
        """Return the rank that made a record if it is another rank of the same launch; else None.

        Args:
            record: Result of :func:`launch_record` in any process, read from a file.
        """
        if not isinstance(record, Mapping) or (record.get("launcher"), record.get("id")) != (self.launcher, self.id):
            return None
        rank = record.get("rank")
        return rank if isinstance(rank, int) and rank != self.rank else None


def this_launch() -> Launch | None:
    """Return the launch of this process; None if the process was started alone."""
    for launcher, variables, names in _LAUNCHERS:
        if not all(name in os.environ for name in variables):
            continue
        rank, world_size, *_ = variables
        try:
            launch = Launch(launcher, _id(names), int(os.environ[rank]), int(os.environ[world_size]))
        except ValueError:
            return None
        return launch if launch.world_size > 1 else None
    return None


def _id(names: tuple[str, ...]) -> str:
    values = [os.environ.get(name, "") for name in names]
    # Two launches on different hosts may both use a local address and the default port, so the host's name is added.
    return " ".join(socket.gethostname() if value in _LOCAL else value for value in values)


def launch_record() -> dict[str, Any]:
    """Return this process's launch and rank for a summary or a reservation; empty if the process was started alone."""
    launch = this_launch()
    return asdict(launch) if launch is not None else {}


@functools.cache
def warn_without_group(launch: Launch) -> None:
    """Warn once that this process saves and loads alone, although its launcher has started several processes."""
    warn(
        f"{launch.launcher} has started {launch.world_size} processes without a process group: rank {launch.rank} "
        f"saves and loads alone. If the ranks train together, call torch.distributed.init_process_group() first. If "
        f"each trains by itself, give each its own root.",
        stacklevel=2,
    )
