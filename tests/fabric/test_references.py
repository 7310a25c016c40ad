"""Objects that Fabric alone frees at once are freed at once with :func:`attach` too, without the collector."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest

from tests.launch import on_ranks
from tests.memory import names_alive


@pytest.mark.parametrize("async_save", [False, True])
@on_ranks(1)
def test_attach_keeps_no_object_longer_than_fabric_alone(tmp_path: Path, async_save: bool) -> None:
    from dcp_plugin.fabric import attach
    from tests.fabric import training as t

    def trained(path: Path, native: bool, **config: Any) -> dict[str, weakref.ref[Any]]:
        fabric = t.fabric_for("single")
        attached = None if native else attach(fabric, **config)
        run = t.Training(fabric).run(2)
        run.save(path)
        run.load(path)
        run.run(3)
        if attached is not None:
            attached.close()
        objects = {"fabric": fabric, "strategy": fabric.strategy, "model": run.state["net"], "loader": run.loader}
        objects |= {"parameter": run.state["net"].head.weight, "optimizer": run.state["optimizer"].optimizer}
        objects |= {"schedule": run.state["schedule"], "wrapped loader": run.loader._dataloader}
        return {name: weakref.ref(value) for name, value in objects.items()}

    native, ours = names_alive(
        tmp_path,
        lambda path: trained(path, native=True),
        lambda path: trained(path, native=False, async_save=async_save),
    )
    assert ours <= native
    assert {"model", "parameter", "optimizer", "loader"}.isdisjoint(native)
