"""Nothing that only shows can fail or delay a save or a load: progress, log lines, warnings, subscribers of events."""

from __future__ import annotations

import itertools
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcp_plugin as dcp
from dcp_plugin import events
from dcp_plugin.core.saving import progress
from tests.launch import on_ranks

pytestmark = pytest.mark.usefixtures("forked_keepers")


def _fail(*args: Any, **kwargs: Any) -> Any:
    raise AttributeError("it only shows")


def _closed() -> Any:
    stream = open(os.devnull, "w")  # noqa: SIM115  closed in the next line, as `2>&-` has it
    stream.close()
    return stream


def _standard_error(stream: Any) -> Callable[[], None]:
    def use() -> None:
        sys.stderr = stream() if callable(stream) else stream

    return use


def _no_thread_for_saves() -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "dcp-save" or isinstance(thread, threading.Timer):
            raise RuntimeError("can't start new thread")
        start(thread)

    threading.Thread.start = refuse  # type: ignore[method-assign]


def _log_to(**methods: Any) -> None:
    handler = logging.StreamHandler()
    vars(handler).update(methods)
    logging.getLogger().addHandler(handler)


BREAKS: dict[str, Callable[[], Any]] = {
    "no standard error": _standard_error(None),
    "a closed standard error": _standard_error(_closed),
    "a standard error that only writes": _standard_error(SimpleNamespace(write=lambda text: None)),
    "a standard error that only raises": _standard_error(SimpleNamespace(isatty=_fail, write=_fail, flush=_fail)),
    "a terminal that only raises": _standard_error(SimpleNamespace(isatty=lambda: True, write=_fail, flush=_fail)),
    "a handler of the log": lambda: _log_to(emit=_fail),
    "a filter of the log": lambda: _log_to(filter=_fail),
    "a filter of our log": lambda: logging.getLogger("dcp_plugin").addFilter(_fail),
    "warnings": lambda: setattr(warnings, "showwarning", _fail),
    "a bar of tqdm": lambda: sys.modules.__setitem__("tqdm", SimpleNamespace(tqdm=SimpleNamespace(write=_fail))),
    "a subscriber": lambda: events.subscribe(_fail),
    "threads": _no_thread_for_saves,
}


class _Folder:
    """A path that is stored as text, with a warning."""

    def __fspath__(self) -> str:
        return "folder"


@pytest.mark.one_of("broken", "options")
@pytest.mark.parametrize("broken", [0, 1])
@pytest.mark.parametrize(
    "options",
    [{}, {"async_save": True}, {"async_save": True, "staging": "lazy"}, {"async_save": True, "keeper": dcp.Keeper()}],
    ids=["blocking", "async", "lazy", "keeper"],
)
@pytest.mark.parametrize("progress_shown", ["auto", True])
@pytest.mark.parametrize("what", BREAKS)
@on_ranks(2)
def test_what_only_shows_fails_no_save_and_no_load(
    tmp_path: Path, what: str, options: dict[str, Any], broken: int, progress_shown: Any
) -> None:
    warnings.simplefilter("always")
    progress.time = SimpleNamespace(monotonic=itertools.count(0.0, 100.0).__next__)  # type: ignore[assignment]
    if dist.get_rank() == broken:
        events.subscribe(lambda event: _fail())  # there is something to log
        BREAKS[what]()
    lines = str(Path(os.devnull) / "no folder")
    torch.manual_seed(0)
    model = torch.nn.Linear(300, 300)
    with closing(dcp.Checkpointer(progress=progress_shown, events=lines, timeout=60, **options)) as ours:
        for step in range(2):
            ours.save({"model": model, "folder": _Folder(), "step": step}, tmp_path / str(step), step).wait()
        with pytest.raises(dcp.UnsafeCheckpoint):
            ours.save({"function": _closed}, tmp_path / "refused").wait()
        target: dict[str, Any] = {"model": torch.nn.Linear(300, 300), "folder": "", "step": 0}
        ours.load(target, tmp_path / "1")
    assert torch.equal(target["model"].weight, model.weight)
    assert target["step"] == 1 and not (tmp_path / "refused").exists()


def test_a_subscriber_that_fails_is_logged_once_for_the_many_events_of_bytes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unsubscribe = events.subscribe(_fail)
    dcp.save({"weights": torch.ones(4 << 20)}, tmp_path / "ck")
    unsubscribe()
    logged = [record.args[0] for record in caplog.records if record.args]
    assert logged == ["SaveStarted", "BytesWritten", "SaveFinished"]
    assert all(record.exc_info for record in caplog.records)
