"""Objects that Accelerate alone frees at once are freed at once with :func:`attach` too, without the collector."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

from tests.launch import on_ranks


@pytest.mark.parametrize("async_save", [False, True])
@on_ranks(1)
def test_attach_keeps_no_object_longer_than_accelerate_alone(tmp_path: Path, async_save: bool) -> None:
    _names_alive(tmp_path / "first-use", native=False, async_save=async_save)  # imports and caches
    gc.collect()
    gc.disable()
    native = _names_alive(tmp_path / "native", native=True)
    gc.collect()
    assert _names_alive(tmp_path / "ours", native=False, async_save=async_save) <= native
    assert {"accelerator", "model"}.isdisjoint(native)


def _names_alive(root: Path, native: bool, **config: Any) -> set[str]:
    """Train, save, load, and drop everything; return the names of the objects that are still alive."""
    references = _trained(root, native, **config)
    return {name for name, reference in references.items() if reference() is not None}


def _trained(root: Path, native: bool, **config: Any) -> dict[str, weakref.ref[Any]]:
    from tests.accelerate import training as t

    run = t.start("single", native=native, **config).train(1)
    run.accelerator.save_state(str(root / "step-1"))
    if run.attached is not None:
        run.attached.wait()
    run.accelerator.load_state(str(root / "step-1"))
    run.train(1)
    objects = {"accelerator": run.accelerator, "model": run.model, "loader": run.loader}
    objects |= {"optimizer": run.optimizer.optimizer, "base loader": run.loader.base_dataloader}
    if run.attached is not None:
        run.attached.close()
    return {name: weakref.ref(one) for name, one in objects.items()}
