"""Runs a keeper: ``python -m dcp_plugin.keeper SPOOL LINGER``. It is started by the ranks of a node, see
:mod:`dcp_plugin.keeper.client`."""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path


def _is_first(folder: Path) -> bool:
    """Return True if no other keeper is alive. Every rank may start one: a late one ends before it imports torch.

    The descriptor stays open, since to close any of a file gives up the lock of its process.
    """
    try:
        descriptor = os.open(folder / "keeper.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


if __name__ == "__main__" and _is_first(Path(sys.argv[1])):
    from dcp_plugin.errors import NoSharedMemory
    from dcp_plugin.keeper.spool import Spool

    spool = Spool(Path(sys.argv[1]))
    try:
        spool.refuse_other_format()  # the package may have been upgraded under a training, which starts this keeper
    except NoSharedMemory as error:
        sys.exit(str(error))
    held = spool.lock()
    if held is not None:
        from dcp_plugin.keeper.process import Keeper

        sys.exit(Keeper(spool, float(sys.argv[2])).run())
