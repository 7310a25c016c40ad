"""Objects that Accelerate alone frees at once are freed at once with :func:`attach` too, without the collector."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest

from tests.launch import on_ranks
from tests.memory import names_alive


@pytest.mark.parametrize("async_save", [False, True])
@on_ranks(1)
def test_attach_keeps_no_object_longer_than_accelerate_alone(tmp_path: Path, async_save: bool) -> None:
    from tests.accelerate import training as t

    def trained(root: Path, native: bool, **config: Any) -> dict[str, weakref.ref[Any]]:
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

    native, ours = names_alive(
        tmp_path,
        lambda path: trained(path, native=True),
        lambda path: trained(path, native=False, async_save=async_save),
    )
    assert ours <= native
    assert {"accelerator", "model"}.isdisjoint(native)
