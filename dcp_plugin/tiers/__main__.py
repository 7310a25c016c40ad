"""Runs a keeper: ``python -m dcp_plugin.tiers SPOOL LINGER``. It is started by the ranks of a node, see
:mod:`dcp_plugin.tiers.keeper_client`."""

from __future__ import annotations

import sys
from pathlib import Path

from dcp_plugin.tiers.locks import become_keeper

if __name__ == "__main__" and (held := become_keeper(Path(sys.argv[1]))) is not None:
    # Every rank may start a keeper: a late one has ended by now, before it imports torch.
    from dcp_plugin.core.errors import NoSharedMemory
    from dcp_plugin.tiers.spool import Spool

    spool = Spool(Path(sys.argv[1]))
    try:
        spool.refuse_other_format()  # the package may have been upgraded under a training, which starts this keeper
    except NoSharedMemory as error:
        sys.exit(str(error))
    from dcp_plugin.core.format import derived_index  # noqa: F401  (now: the package may be upgraded later)
    from dcp_plugin.tiers.process import KeeperProcess

    sys.exit(KeeperProcess(spool, held, float(sys.argv[2])).run())
