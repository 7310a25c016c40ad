"""Every option of ``ModelCheckpoint`` saves, names, links and deletes what it does with Lightning's own checkpoints.

One training has a ModelCheckpoint for each option. It is run by Lightning alone, and with the plugin, in the
foreground and in the background.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_plugin.core.media import medium_of
from dcp_plugin.core.media.places import WORKSPACE
from dcp_plugin.core.paths import Where, as_path
from dcp_plugin.core.runs import figures
from tests.compare import assert_same
from tests.launch import on_ranks
from tests.object_server import Bucket

SCORES = [5.0, 3.0, 4.0, 1.0, 2.0, 6.0]
"""What is monitored, by epoch."""

OPTIONS: dict[str, dict[str, Any]] = {
    "best_two": {"monitor": "score", "save_top_k": 2, "filename": "{epoch}-{score:.1f}"},
    "worst_one": {"monitor": "score", "mode": "max", "save_top_k": 1},
    "best_with_link": {"monitor": "score", "save_top_k": 1, "save_last": "link"},
    "newest": {},
    "all": {"save_top_k": -1, "every_n_train_steps": 3},
    "epochs": {"save_top_k": -1, "every_n_epochs": 4},
    "seconds": {"train_time_interval": timedelta(0), "save_top_k": 1},
    "weights": {"save_weights_only": True},
    "last": {"save_last": True, "every_n_epochs": 2},
    "last_named": {"save_last": True, "save_top_k": 0, "every_n_train_steps": 4},
    "link": {"save_last": "link", "save_top_k": -1, "every_n_epochs": 3},
    "link_to_newest": {"save_last": "link", "save_top_k": 1},
    "versions": {"filename": "same", "save_top_k": -1, "every_n_train_steps": 2},
    "overwritten": {"filename": "same", "save_top_k": -1, "enable_version_counter": False, "every_n_train_steps": 2},
    "early": {"save_on_train_epoch_end": True, "monitor": "loss", "mode": "max", "save_top_k": 2},
    "late": {"save_on_train_epoch_end": False, "save_top_k": -1, "every_n_epochs": 5},
}


HALVES = {"even": list(OPTIONS)[::2], "odd": list(OPTIONS)[1::2]}
each_half = pytest.mark.parametrize("half", HALVES)


def _callbacks(root: Where, half: str) -> list[Any]:
    """Of a class each: Lightning keeps their states apart by class and some of the options."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    kinds = {name: type(name, (ModelCheckpoint,), {}) for name in OPTIONS}
    kinds["last_named"].CHECKPOINT_NAME_LAST = "last-{step}"
    return [kinds[name](root / name, **OPTIONS[name]) for name in HALVES[half]]


def _train(root: Where, layout: str, half: str, plugin: Any, *others: Any) -> list[Any]:
    """The callbacks after six epochs of two batches each."""
    from tests.lightning import training as t

    class Scored(t.Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", float(self.global_step))
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("score", SCORES[self.current_epoch], sync_dist=True)

    callbacks = _callbacks(root, half)
    trainer = t.trainer_for(
        layout, [*others, *callbacks], plugin=plugin, stock=plugin is None, max_steps=-1, max_epochs=6
    )
    trainer.fit(Scored(layout), t.plain_loader(layout, 2), t.DataLoader(t.data(2), batch_size=2))
    return callbacks


def _there(root: Where) -> dict[str, str]:
    """Every checkpoint, and where it leads if it is a link."""
    medium = medium_of(root)
    return {
        f"{folder.path.name}/{one.path.name}": os.readlink(one.path) if os.path.islink(one.path) else ""
        for folder in medium.entries(root)
        for one in medium.entries(folder.path)
        if one.path.name != WORKSPACE and one.path.suffix != figures.SUFFIX
    }


def _remembered(callback: Any) -> dict[str, Any]:
    names = ("best_model_path", "last_model_path", "kth_best_model_path")
    known = {name: Path(getattr(callback, name)).name for name in names}
    best = {Path(path).name: float(score) for path, score in callback.best_k_models.items()}
    return {**known, "best": best, "score": callback.best_model_score, "key": callback.state_key}


def _watch(root: Where) -> Any:
    """At every batch: where there was a checkpoint once there is one, and what is linked to can be loaded."""
    from lightning.pytorch.callbacks import Callback

    import dcp_plugin as dcp

    seen: set[str] = set()

    class Watch(Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            committed = {state.path.parent.name for state in dcp.list_checkpoints(root) if state.committed}
            assert seen <= committed, f"no checkpoint is left in {seen - committed}"
            seen.update(committed)
            links = root.glob("*/*") if isinstance(root, Path) else ()
            for link in (path for path in links if path.is_symlink()):
                assert dcp.inspect(link).step is not None, link

    return Watch()


@pytest.mark.one_of("half")
@each_half
@pytest.mark.parametrize(
    ("layout", "ways"),
    [("ddp", ["background"]), pytest.param("fsdp2", ["foreground", "background"], marks=pytest.mark.long)],
    ids=["ddp", "fsdp2"],
)
@on_ranks(2)
def test_every_option_does_what_it_does_without_the_plugin(
    tmp_path: Path, layout: str, ways: list[str], half: str
) -> None:
    _compare_with_stock(tmp_path, tmp_path, layout, half, ways)


@pytest.mark.one_of
@each_half
@on_ranks(1)
def test_every_option_does_in_a_store_what_it_does_on_a_disk(tmp_path: Path, half: str) -> None:
    _compare_with_stock(tmp_path, as_path("memory://options"), "single", half, ["background"])


@pytest.mark.long
@each_half
@on_ranks(2)
def test_every_option_does_in_a_bucket_what_it_does_on_a_disk(tmp_path: Path, bucket: Bucket, half: str) -> None:
    _compare_with_stock(tmp_path, as_path(bucket.url), "fsdp2", half, ["foreground", "background"])


def _compare_with_stock(tmp_path: Path, place: Where, layout: str, half: str, ways: list[str]) -> None:
    """A store has no links: what is one on a disk is a checkpoint of its own there."""
    import dcp_plugin as dcp
    from dcp_plugin import events
    from tests.lightning import training as t
    from tests.slowness import pause

    events.subscribe(pause(0.01))  # wide enough that batches are trained while a save is in flight
    stock = _train(tmp_path / "stock", layout, half, None)
    for name in ways:
        io = t.DCPCheckpointIO(async_save=name == "background")
        ours = _train(place / name, layout, half, io, _watch(place / name))
        torch.distributed.barrier()  # rank 0 deletes
        assert [_remembered(callback) for callback in ours] == [_remembered(callback) for callback in stock]
        torch.distributed.barrier()  # rank 0 deletes
        found, wanted = _there(place / name), _there(tmp_path / "stock")
        assert found == (wanted if isinstance(place, Path) else dict.fromkeys(wanted, ""))
        for path in sorted((tmp_path / "stock").glob("*/*.ckpt")):
            mine = place / name / str(path.relative_to(tmp_path / "stock"))
            written = torch.load(path / "meta.pt" if path.is_dir() else path, weights_only=False)
            assert dcp.inspect(mine).step == written["global_step"], mine
            if path.is_file() and not path.is_symlink():
                loaded = io.load_checkpoint(mine)
                assert_same(written["state_dict"], loaded["state_dict"])
                assert written.keys() == loaded.keys() - {"hyper_parameters"}, mine
