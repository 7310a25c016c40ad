"""Everything that a save and a load of live objects need. Nothing here imports the rest of the package.

A save passes through these stages, which :mod:`~dcp_plugin.core.saving.job` calls in this order:

=======  ================  ======================================================================================
stage    folder            work
=======  ================  ======================================================================================
gather   ``state/``        names each tensor and value of the live objects
stage    ``staging/``      copies them to host memory, if the training continues during the save
plan     ``planning/``     decides with all ranks who writes which part of which tensor
write    ``storage/``      writes this rank's part; ``format/`` says what bytes mean, ``media/`` where they are
publish  ``storage/``      rank 0 writes the index, and the medium makes the checkpoint visible
=======  ================  ======================================================================================

``saving/queue.py`` orders the saves of a checkpointer. ``saving/writers.py`` and ``background.py`` have the writers:
the thread that calls, and a thread in the background.

A load passes through these stages, which :mod:`~dcp_plugin.core.loading.load` calls in this order:

=======  ================  ======================================================================================
open     ``storage/``      reads the index of the checkpoint, also of another tool's
match    ``loading/``      finds the stored key of each target, and reports all misfits at once
plan     ``planning/``     finds the stored boxes that this rank's targets need
read     ``storage/``      fills the targets
apply    ``state/``        passes the tensors and values to their objects
=======  ================  ======================================================================================

The records between stages are in :mod:`~dcp_plugin.core.records`. ``ranks/`` lets every rank raise or none. ``runs/``
finds, judges and deletes the checkpoints of a folder. ``tensors/`` has what differs between kinds of tensors.

The packages of frameworks import these modules, and no others: ``config``, ``errors``, ``events``, ``partial``,
``paths``, ``ranks.collectives``, ``ranks.meeting``, ``records``, ``runs.catalog``, ``runs.damage``, ``runs.deletion``,
``runs.foreign``, ``runs.scan``, ``saving.queue``, ``sources``, ``staging.guard``, ``state``, ``state.random_streams``,
``tensors._torch`` and ``types``. The keeper, the tools and ``integration/`` extend the core, and import what they need.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

keeper: Callable[[], Any] | None = None
"""Function that returns the :class:`~dcp_plugin.core.sources.KeeperFactories`. The package registers it, since nothing
here imports the keeper."""
resume_check: Callable[[], Any] | None = None
"""Function that returns :mod:`dcp_plugin.tools.resume_check`, registered in the same way: the start of a run is below
the tools."""
