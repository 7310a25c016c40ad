"""Runs a keeper: ``python -m dcp_plugin.keeper SPOOL``. It is started by the ranks of a node, see
:mod:`dcp_plugin.keeper.client`."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    from dcp_plugin.keeper.spool import Spool

    spool = Spool(Path(sys.argv[1]))
    held = spool.lock()
    if held is not None:  # else another one was quicker
        from dcp_plugin.keeper.process import Keeper

        sys.exit(Keeper(spool, float(sys.argv[2])).run())
