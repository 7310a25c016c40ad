"""Processes of other users, for tests that run as root."""

from __future__ import annotations

import functools
import os
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import pytest

import dcp_plugin as dcp

OTHER_USER = 12345


@functools.cache
def _import_all() -> None:
    """Import what a save and a load need: the other user may not be able to read Python's own modules."""
    with tempfile.TemporaryDirectory() as folder:
        dcp.save({"step": 1}, f"{folder}/step-1", keep_last=1)
        dcp.load({}, f"{folder}/step-1")
        dcp.latest(folder)


def as_another_user(function: Callable[..., Any], *args: Any, user: int = OTHER_USER) -> str:
    """``function(*args)`` in a process of a user without rights here: its result, or the text of its error."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    _import_all()
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            told = str(function(*args))
        except dcp.CheckpointError as error:
            told = f"{type(error).__name__}: {error}"
        except BaseException:
            told = traceback.format_exc()
        os.write(theirs, told.encode())
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as pipe:
        told = pipe.read()
    os.waitpid(pid, 0)
    return told
