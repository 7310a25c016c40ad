"""A URL is a path in every integration: of an object store, or of a disk (``file://``); any other is refused before
anything is made of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dcp_plugin.core.paths import as_path, text_of
from tests.launch import on_ranks
from tests.object_server import Bucket
from tests.places import names_in


def test_what_is_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("/a/b", "a", "./s3:/b", "c:/b", "x=1:/", "/a/memory:/b", Path("/a")):
        assert text_of(path) == os.fspath(path)
    for path in ("file:///a/b", "file:/a/b", Path("file:///a/b"), tmp_path / "file:/a/b"):
        assert text_of(path) == "/a/b"
    assert text_of("file://a/b") == "a/b"  # as fsspec takes it
    for path in ("s3://b/x/", "s3a://b/x", Path("s3://b/x"), tmp_path / "s3:/b/x"):
        assert text_of(path) == "s3://b/x"
    for path in ("hdfs+a.b-c://x", "hf://x", tmp_path / "gdrive:/b", "zip::s3://b"):
        with pytest.raises(ValueError, match="URL"):
            text_of(path)


def _doors(scratch: Path) -> dict[str, Callable[[Any], Any]]:
    """Every way into the package that takes a path."""
    import torch
    from accelerate import Accelerator
    from lightning.fabric import Fabric

    import dcp_plugin as dcp
    from dcp_plugin import accelerate, lightning
    from dcp_plugin import fabric as ours
    from tests.lightning import training as t

    fabric, accelerator, module = Fabric(accelerator="cpu", devices=1), Accelerator(cpu=True), torch.nn.Linear(2, 2)
    ours.attach(fabric)
    accelerate.attach(accelerator)
    accelerator.prepare(torch.nn.Linear(2, 2))
    return {
        "save": lambda path: dcp.save({"n": 1}, path),
        "load": lambda path: dcp.load({"n": 0}, path),
        "inspect": dcp.inspect,
        "latest": dcp.latest,
        "events": lambda path: dcp.CheckpointConfig(events=path),
        "fabric.save": lambda path: fabric.save(path, {"model": module}),
        "fabric.load": lambda path: fabric.load(path, {"model": module}),
        "accelerator.save_state": accelerator.save_state,
        "accelerator.load_state": accelerator.load_state,
        "project_dir": _project,
        "dirpath": _fit,
        "default_root_dir": lambda path: _fit(default_root_dir=path),
        "ckpt_path": lambda path: _fit(scratch / "x", ckpt_path=path),
        "init_from": lambda path: _fit(scratch / "x", plugin=t.DCPCheckpointIO(init_from=path)),
        "load_from_checkpoint": lambda path: lightning.load_from_checkpoint(t.Model, path),
        "CheckpointIO": t.DCPCheckpointIO().load_checkpoint,
    }


def _fit(dirpath: Any = None, ckpt_path: Any = None, **options: Any) -> str:
    from lightning.pytorch.callbacks import ModelCheckpoint

    from tests.lightning import training as t

    io = options.pop("plugin", None)
    saving = ModelCheckpoint(dirpath, every_n_train_steps=1)
    trainer = t.trainer_for("single", [saving], plugin=io, max_steps=1, **options)
    module = t.Model()
    try:
        trainer.fit(module, t.plain_loader("single"), ckpt_path=ckpt_path)
    except ValueError:
        assert not module.losses
        raise
    return saving.best_model_path


def _project(path: Any) -> None:
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    from dcp_plugin import accelerate

    settings = ProjectConfiguration(path, automatic_checkpoint_naming=True)
    accelerate.attach(Accelerator(cpu=True, project_config=settings))


@on_ranks(1)
def test_every_integration_takes_the_url_of_a_disk(tmp_path: Path) -> None:
    os.chdir(tmp_path)
    doors = _doors(tmp_path)

    def made(name: str) -> str:
        return f"file://{tmp_path}/{name}"

    for name in ("", "fabric.", "accelerator."):
        saving, loading = ("save_state", "load_state") if "acc" in name else ("save", "load")
        doors[f"{name}{saving}"](made(f"by {name}"))
        doors[f"{name}{loading}"](made(f"by {name}"))
    best = doors["dirpath"](made("dirpath"))
    assert best == f"{tmp_path}/dirpath/epoch=0-step=1.ckpt"
    root = doors["default_root_dir"](made("root"))
    assert Path(root.removeprefix("file:")).parent == tmp_path / "root" / "checkpoints"
    doors["ckpt_path"](f"file://{best}")
    assert set(names_in(tmp_path)) == {"by ", "by fabric.", "by accelerator.", "dirpath", "root"}


@on_ranks(1)
def test_every_integration_takes_the_url_of_a_store_and_makes_nothing_on_the_disk(tmp_path: Path) -> None:
    import dcp_plugin as dcp

    os.chdir(tmp_path)
    doors = _doors(tmp_path)
    url = as_path("memory://doors")
    for name in ("", "fabric.", "accelerator."):
        saving, loading = ("save_state", "load_state") if "acc" in name else ("save", "load")
        doors[f"{name}{saving}"](url / f"by {name}")
        doors[f"{name}{loading}"](str(url / f"by {name}"))
    best = doors["dirpath"](str(url / "dirpath"))
    assert best == url / "dirpath" / "epoch=0-step=1.ckpt" == dcp.latest(url / "dirpath")
    assert doors["default_root_dir"](str(url / "root")) == url / "root" / "checkpoints" / "epoch=0-step=1.ckpt"
    doors["project_dir"](str(url / "project"))
    for name in ("load_from_checkpoint", "CheckpointIO", "inspect"):
        assert doors[name](best) is not None, name
    assert not list(tmp_path.iterdir())
    for name in ("ckpt_path", "init_from"):
        doors[name](best)
    with pytest.raises(ValueError, match="must be on a file system"):
        doors["events"](best)


@on_ranks(1)
def test_every_integration_refuses_what_is_no_url_of_a_store(tmp_path: Path) -> None:
    os.chdir(tmp_path)
    for name, door in _doors(tmp_path).items():
        with pytest.raises(ValueError, match="is a URL of an unknown kind"):
            door("local://ck/x")  # to fsspec a disk, and to nobody else
        assert not list(tmp_path.iterdir()), name


@on_ranks(1)
def test_options_of_a_store_reach_it_through_lightning_and_fabric(bucket: Bucket) -> None:
    """Where the environment says nothing of it."""
    import torch
    from lightning.fabric import Fabric

    import dcp_plugin as dcp
    from dcp_plugin import fabric, lightning
    from tests.lightning import training as t

    said = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("AWS_")}
    options = {
        "endpoint": said["AWS_ENDPOINT_URL"],
        "region": said["AWS_REGION"],
        "access_key_id": said["AWS_ACCESS_KEY_ID"],
        "secret_access_key": said["AWS_SECRET_ACCESS_KEY"],
        "client_options": {"allow_http": True},
    }
    root = f"{bucket.url}/run"
    io = t.DCPCheckpointIO(storage_options=options)
    trainer, model = t.trainer_for("single", plugin=io, max_steps=1), t.Model()
    trainer.fit(model, t.plain_loader("single"))
    trainer.save_checkpoint(f"{root}/one.ckpt")
    resumed = t.trainer_for("single", plugin=t.DCPCheckpointIO(storage_options=options), max_steps=2)
    resumed.fit(t.Model(seed=5), t.plain_loader("single"), ckpt_path=f"{root}/one.ckpt")
    assert resumed.global_step == 2
    warm = t.DCPCheckpointIO(storage_options=options, init_from=f"{root}/one.ckpt")
    t.trainer_for("single", plugin=warm, max_steps=1).fit(t.Model(seed=5), t.plain_loader("single"))
    assert warm.started is not None and warm.started.how == "warm-started"
    loaded = lightning.load_from_checkpoint(t.Model, f"{root}/one.ckpt", storage_options=options)
    assert torch.equal(loaded.net.head.bias, model.net.head.bias)
    assert dcp.latest(root, storage_options=options) == f"{root}/one.ckpt"
    trainer.strategy.remove_checkpoint(f"{root}/one.ckpt")
    assert dcp.latest(root, storage_options=options) is None

    here = Fabric(accelerator="cpu", devices=1)
    attached = fabric.attach(here, storage_options=options)
    here.save(f"{root}/fabric", {"model": model, "step": 3})
    assert attached.resume_or_init({"model": t.Model(seed=5)}, root, strict=False).path == f"{root}/fabric"
