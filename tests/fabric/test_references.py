"""Objects that Fabric alone frees at once are freed at once with :func:`attach` too, without the collector."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

from tests.launch import on_ranks


@pytest.mark.parametrize("async_save", [False, True])
@on_ranks(1)
def test_attach_keeps_no_object_longer_than_fabric_alone(tmp_path: Path, async_save: bool) -> None:
    _names_alive(tmp_path / "first-use", native=False, async_save=async_save)  # imports and caches
    gc.collect()
    gc.disable()
    native = _names_alive(tmp_path / "native", native=True)
    gc.collect()
    assert _names_alive(tmp_path / "ours", native=False, async_save=async_save) <= native
    assert {"model", "parameter", "optimizer", "loader"}.isdisjoint(native)


def _names_alive(path: Path, native: bool, **config: Any) -> set[str]:
    """Train, save, load, and drop everything; return the names of the objects that are still alive."""
    references = _trained(path, native, **config)
    return {name for name, reference in references.items() if reference() is not None}


def _trained(path: Path, native: bool, **config: Any) -> dict[str, weakref.ref[Any]]:
    from dcp_plugin.fabric import attach
    from tests.fabric import training as t

    fabric = t.fabric_for("single")
    attached = None if native else attach(fabric, **config)
    run = t.Training(fabric)
    run.run(2)
    run.save(path)
    run.load(path)
    run.run(3)
    if attached is not None:
        attached.close()
    objects = {"fabric": fabric, "strategy": fabric.strategy, "model": run.state["net"], "loader": run.loader}
    objects |= {"parameter": run.state["net"].head.weight, "optimizer": run.state["optimizer"].optimizer}
    objects |= {"schedule": run.state["schedule"], "wrapped loader": run.loader._dataloader}
    return {name: weakref.ref(value) for name, value in objects.items()}
