"""Decision for each save: all ranks save together, or rank 0 saves alone.

Stock Accelerate writes a replicated training on rank 0, so many scripts have ``if accelerator.is_main_process:
accelerator.save_state(path)``. Here a save is collective, and rank 0 would wait for ranks that never call. Before any
collective of a save the ranks therefore decide with a ``compare_set`` in the store of the process group:

- A rank other than 0 decides "together", and waits for rank 0 in the save.
- Rank 0 waits :data:`FIRST_WAIT` seconds for such a rank, and then decides "alone". In later saves it waits
  :data:`LATER_WAIT` seconds, until a rank is late.
- A late rank reads "alone" and saves nothing. It asks rank 0 to wait for :data:`FIRST_WAIT` again.

The key of a save consists of the attachment, the path, and the number of optimizer steps since ``attach``. These are
the same on all ranks, unlike a count of calls, which differs once rank 0 has called alone. A rank that waits in the
same call of the program as rank 0, after the same number of steps, but with another path, makes the same save: rank 0
joins, and the save fails on all ranks.
"""

from __future__ import annotations

import itertools
import json
import time
import weakref
from collections import deque
from collections.abc import Iterable
from functools import partial
from traceback import walk_stack
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.optim.optimizer import register_optimizer_step_post_hook

from dcp_plugin.accelerate import _accelerate
from dcp_plugin.core.errors import logger
from dcp_plugin.core.paths import Where, resolved
from dcp_plugin.core.ranks.collectives import Call
from dcp_plugin.core.ranks.meeting import within_timeout
from dcp_plugin.core.tensors._torch import default_store

FIRST_WAIT = 60.0
"""Seconds that rank 0 waits for another rank."""
LATER_WAIT = 1.0
"""Seconds that rank 0 waits once it has saved alone. More than 0, since the other ranks may call a moment later."""
_MOST_DECISIONS = 100
"""Number of decisions "alone" that stay in the store for late ranks. No rank is this many saves behind rank 0."""

_TOGETHER, _ALONE = "together", "alone"
_attachments = itertools.count()


class Attendance:
    """Ranks that take part in the saves of an accelerator with several processes.

    Args:
        timeout: Seconds after which a store that does not answer counts as failed.
    """

    def __init__(self, accelerator: Accelerator, timeout: float) -> None:
        self._accelerator = weakref.ref(accelerator)
        self._timeout = timeout
        self._prefix = f"dcp_plugin/saves/{next(_attachments)}"
        self._late, self._waiting = f"{self._prefix}/late", f"{self._prefix}/waiting"
        self._steps = 0
        self._saves_alone = False
        self._decided_alone: deque[str] = deque()
        self._call: list[Any] = []  # number of steps, and lines of the program on the stack
        self._key = ""  # key of the current save, until all ranks take part
        hook = register_optimizer_step_post_hook(self._count)
        self.close = weakref.finalize(accelerator, hook.remove)
        """Function that stops the counting of steps."""

    def rank_0_saves_alone(self, path: Where) -> bool:
        """Decide about the save that begins, and return whether rank 0 saves alone. Rank 0 waits for another rank.

        Raises:
            RankFailure: The store of the process group no longer exists, or does not answer.
        """
        if not dist.is_initialized():  # a script may have destroyed its group at its end
            return False
        self._key = f"{self._prefix}/{self._steps}/{resolved(path)}"
        self._call = [self._steps, *(f"{frame.f_code.co_filename}:{line}" for frame, line in walk_stack(None))]
        caller = Call.save(path, None).caller
        decide = partial(self._come, path) if dist.get_rank() > 0 else partial(self._wait_for_others, path, caller)
        return within_timeout(decide, FIRST_WAIT + self._timeout)

    def all_have_come(self) -> None:
        """Forget a decision "together" that all ranks have read. Another save to the same path may follow before the
        next optimizer step."""
        key, self._key = self._key, ""
        if key and dist.get_rank() == 0:
            store = default_store()
            store.delete_key(key)
            store.delete_key(self._waiting)

    def _count(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        accelerator = self._accelerator()
        if accelerator is not None and any(optimizer is other for other in _accelerate.optimizers(accelerator)):
            self._steps += 1

    def _come(self, path: Where) -> bool:
        """Decide on another rank than 0."""
        store = default_store()
        if store.compare_set(self._key, "", _TOGETHER) == _TOGETHER.encode():
            store.set(self._waiting, json.dumps([str(resolved(path)), self._call]))
            return False
        store.set(self._late, "")
        logger.warning(
            "rank %d came to the save of %s after rank 0 had waited and saved it alone: the checkpoint lacks the "
            "random streams of this rank, and its place in loaders over iterable datasets. From the next save on rank "
            "0 waits for up to %g s again.",
            dist.get_rank(),
            path,
            FIRST_WAIT,
        )
        return True

    def _wait_for_others(self, path: Where, caller: str) -> bool:
        """Decide on rank 0."""
        store = default_store()
        if self._saves_alone and store.check([self._late]):
            store.delete_key(self._late)
            self._saves_alone = False
        wait = min(LATER_WAIT if self._saves_alone else FIRST_WAIT, self._timeout)
        other_path = ""
        _appears(store, (self._key, self._waiting), wait)
        is_decided = store.check([self._key])
        if not is_decided and store.check([self._waiting]):
            other_path, other_call = json.loads(store.get(self._waiting))
            # With uneven inputs the other rank may have made fewer steps. A failed save does not delete its key.
            if other_path == str(resolved(path)) or other_call == self._call:
                store.delete_key(self._waiting)
                return False
        if store.compare_set(self._key, "", _ALONE) == _TOGETHER.encode():
            return False
        self._remember(store)
        if other_path or not (is_decided or self._saves_alone):
            logger.warning(
                "%s: no other rank has called save_state with this path within %g s (called at %s), so rank 0 saves "
                "alone. The checkpoint resumes on all ranks, and lacks the random streams of the others and their "
                "places in loaders over iterable datasets. Call save_state on every rank, without `if "
                "accelerator.is_main_process`: then nothing is missing, and each rank writes a part.%s",
                path,
                wait,
                caller,
                f" Another rank waits in a save of {other_path}: if that is the same save, give all ranks one path."
                if other_path
                else "",
            )
        self._saves_alone = True
        return True

    def _remember(self, store: Any) -> None:
        if self._key not in self._decided_alone:
            self._decided_alone.append(self._key)
        if len(self._decided_alone) > _MOST_DECISIONS:
            store.delete_key(self._decided_alone.popleft())


def _appears(store: Any, keys: Iterable[str], seconds: float) -> None:
    """Wait until the store has one of the keys, or ``seconds`` have passed.

    ``store.wait`` would write two warnings to standard error after that time, and lock the store for other threads
    until then.
    """
    deadline, pause = time.monotonic() + seconds, 0.0005
    while not any(store.check([key]) for key in keys) and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
