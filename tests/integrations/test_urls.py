"""A path that is a URL is an error in every integration, before anything is made of it; ``file://`` is a path."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dcp_plugin.paths import text_of as as_local
from tests.launch import on_ranks


def test_what_is_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("/a/b", "a", "./s3:/b", "c:/b", "x=1:/", "/a/memory:/b", Path("/a")):
        assert as_local(path) == os.fspath(path)
    for path in ("file:///a/b", "file:/a/b", Path("file:///a/b"), tmp_path / "file:/a/b"):
        assert as_local(path) == "/a/b"
    assert as_local("file://a/b") == "a/b"  # as fsspec takes it
    for path in ("s3://b/x", "S3://b/x/", "s3a://b//x", Path("s3://b/x"), tmp_path / "s3:/b/x"):
        assert as_local(path) == "s3://b/x"
    for path in ("hdfs+a.b-c://x", Path("hdfs://x"), tmp_path / "hdfs:/b", "zip::s3://b"):
        with pytest.raises(ValueError, match="URL"):
            as_local(path)


@on_ranks(1)
def test_every_integration_refuses_a_url_at_the_start_and_takes_a_file_url(tmp_path: Path) -> None:
    import torch
    from accelerate import Accelerator
    from lightning.fabric import Fabric
    from lightning.pytorch.callbacks import ModelCheckpoint

    import dcp_plugin as dcp
    from dcp_plugin import accelerate, fabric, lightning
    from tests.lightning import training as t

    os.chdir(tmp_path)
    here = Fabric(accelerator="cpu", devices=1)
    fabric.attach(here)
    module = torch.nn.Linear(2, 2)
    accelerator = Accelerator(cpu=True)
    accelerate.attach(accelerator)
    model = accelerator.prepare(torch.nn.Linear(2, 2))

    def fit(dirpath: Any = None, ckpt_path: Any = None, **options: Any) -> str:
        io = options.pop("plugin", None)
        saving = ModelCheckpoint(dirpath, every_n_train_steps=1)
        trainer = t.trainer_for("single", [saving], plugin=io, max_steps=1, **options)
        lightning_module = t.Model()
        try:
            trainer.fit(lightning_module, t.plain_loader("single"), ckpt_path=ckpt_path)
        except ValueError:
            assert not lightning_module.losses
            raise
        return saving.best_model_path

    integrations: dict[str, Callable[[Any], Any]] = {
        "save": lambda path: dcp.save({"n": 1}, path),
        "load": lambda path: dcp.load({"n": 0}, path),
        "inspect": dcp.inspect,
        "latest": dcp.latest,
        "base": lambda path: dcp.CheckpointConfig(base=path),
        "events": lambda path: dcp.CheckpointConfig(events=path),
        "fabric.save": lambda path: here.save(path, {"model": module}),
        "fabric.load": lambda path: here.load(path, {"model": module}),
        "dirpath": fit,
        "default_root_dir": lambda path: fit(default_root_dir=path),
        "ckpt_path": lambda path: fit(tmp_path / "x", ckpt_path=path),
        "init_from": lambda path: fit(tmp_path / "x", plugin=t.DCPCheckpointIO(init_from=path)),
        "load_from_checkpoint": lambda path: lightning.load_from_checkpoint(t.Model, path),
        "CheckpointIO": t.DCPCheckpointIO().load_checkpoint,
    }
    for name, integration in integrations.items():
        with pytest.raises(ValueError, match="is a URL"):
            integration("memory://ck/x")
        assert not list(tmp_path.iterdir()), name

    def made(name: str) -> str:
        return f"file://{tmp_path}/{name}"

    dcp.save({"n": 1}, made("plain"))
    state = {"n": 0}
    dcp.load(state, made("plain"))
    assert state == {"n": 1}
    here.save(made("fabric"), {"model": module})
    here.load(made("fabric"), {"model": module})
    accelerator.save_state(made("accelerate"))
    accelerator.load_state(made("accelerate"))
    best = fit(made("dirpath"))
    assert best == f"{tmp_path}/dirpath/epoch=0-step=1.ckpt"
    assert Path(fit(default_root_dir=made("root")).removeprefix("file:")).parent == tmp_path / "root" / "checkpoints"
    fit(tmp_path / "resumed", ckpt_path=f"file://{best}")
    found = {path.name for path in tmp_path.iterdir()}
    assert found == {"plain", "fabric", "accelerate", "dirpath", "root"}
    assert model is not None
