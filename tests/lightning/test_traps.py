"""Where Lightning's own sharded or asynchronous checkpoints go wrong, and ours do not.

Each test runs Lightning alone first and expects the failure. Where one of these expectations does not hold any more,
Lightning has mended it: rejoice, and see what can be deleted here and there.
"""

from __future__ import annotations

import os
import signal
import threading
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import launch
from tests.compare import assert_same, same_bytes
from tests.damage import fill_disk
from tests.launch import on_ranks
from tests.limits import HANG
from tests.messages import warned
from tests.places import names_in
from tests.training import Stream


def _differ(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return any(not same_bytes(value, other[key]) for key, value in one.items())


STOCK: dict[str, Any] = {"stock": True}
OURS: dict[str, Any] = {"plugin": True}


@on_ranks(4)
def test_trap_1_hybrid_shard_of_fsdp1_resumes_with_its_optimizer_state(tmp_path: Path) -> None:
    from tests.lightning import training as t

    for way, right in ((STOCK, False), (OURS, True)):
        saved = t.saved("fsdp1_hsdp", tmp_path / str(right), **way)
        loaded = t.resumed("fsdp1_hsdp", tmp_path / str(right), **way).state
        assert _differ(saved, loaded) is not right
        moments = torch.cat([value.ravel() for key, value in loaded.items() if key.endswith("exp_avg")])
        everywhere = [torch.empty_like(moments) for _ in range(4)]
        dist.all_gather(everywhere, moments)
        assert all(torch.equal(moments, other) for other in everywhere) or not right


@pytest.mark.parametrize("way", [STOCK, OURS], ids=["stock", "ours"])
def test_trap_2_a_rank_killed_while_overwriting_leaves_the_old_checkpoint(tmp_path: Path, way: dict[str, Any]) -> None:
    launch.run(_write_once, 2, tmp_path, way)
    outcomes = launch.outcomes_of(_overwrite_and_die, 2, tmp_path, way)
    assert outcomes[1].exit_code == -signal.SIGKILL
    launch.run(_read_overwritten, 2, tmp_path, way)


def _write_once(root: Path, way: dict[str, Any]) -> None:
    from tests.lightning import training as t

    torch.save(t.saved("fsdp2", root / "checkpoint", **way), root / f"old-{dist.get_rank()}.pt")


def _overwrite_and_die(root: Path, way: dict[str, Any]) -> None:
    from dcp_plugin import events
    from tests.lightning import training as t
    from tests.slowness import RankGate

    rank_0_has_written = RankGate("rank 0 has written")

    def die(*args: Any) -> None:
        rank_0_has_written()
        os.kill(os.getpid(), signal.SIGKILL)

    trainer = t.trainer_for("fsdp2", max_steps=5, **way)
    trainer.fit(t.Model("fsdp2"), t.plain_loader("fsdp2"))
    torch.save(t.whole_state(trainer), root / f"new-{dist.get_rank()}.pt")
    from torch.distributed.checkpoint import FileSystemWriter

    write = FileSystemWriter.write_data

    def write_and_tell(*args: Any) -> Any:
        written = write(*args)
        rank_0_has_written.open()
        return written

    def ours(event: events.Event) -> None:
        if isinstance(event, events.BytesWritten) and dist.get_rank() == 1:
            die()
        elif isinstance(event, events.BytesWritten) and event.written == event.total:
            rank_0_has_written.open()

    if way == OURS:
        events.subscribe(ours)
    else:
        FileSystemWriter.write_data = die if dist.get_rank() == 1 else write_and_tell  # type: ignore[assignment, method-assign]
    trainer.save_checkpoint(root / "checkpoint")


def _read_overwritten(root: Path, way: dict[str, Any]) -> None:
    from tests.lightning import training as t

    old, new = (torch.load(root / f"{name}-{dist.get_rank()}.pt", weights_only=True) for name in ("old", "new"))
    loaded = t.resumed("fsdp2", root / "checkpoint", **way).state
    if way == OURS:
        assert_same(old, loaded)
    else:
        assert _differ(old, loaded) and _differ(new, loaded), "half of each, without a word"


@on_ranks(1)
def test_trap_3_last_is_the_newest_that_can_be_loaded_and_never_a_training_from_scratch(tmp_path: Path) -> None:
    from dcp_plugin import CheckpointNotFound
    from tests.lightning import training as t

    for name, way in (("stock", STOCK), ("ours", OURS)):
        folder = tmp_path / name
        good, torn, link = (folder / f"last{suffix}.ckpt" for suffix in ("", "-v1", "-v2"))
        saved = t.saved("single", good, **way)
        torn.mkdir()
        (torn / "__0_0.distcp").write_bytes(b"the beginning")
        os.utime(torn, (good.stat().st_mtime + 10,) * 2)  # newer, however coarse the clock is
        if way is STOCK:
            with pytest.raises(IsADirectoryError):
                _from_last(t, folder, way)
        else:
            loaded, said = _from_last(t, folder, way)
            assert_same(saved, loaded)
            assert any("passes over" in text and "last-v1.ckpt" in text for text in said)
        torn.rename(folder / "elsewhere")
        good.rename(folder / "step=3.ckpt")
        link.symlink_to("step=2.ckpt")
        loaded, _ = _from_last(t, folder, way)
        assert _differ(saved, loaded) is (way is STOCK), "Lightning trains from scratch"
    (folder / "step=3.ckpt").rename(tmp_path / "moved")
    with pytest.raises(CheckpointNotFound, match=r"last-v2.ckpt: it is a link to .*step=2.ckpt, which is not there"):
        _from_last(t, folder, OURS)
    link.unlink()
    assert _from_last(t, folder, OURS)[0], "without anything called last, a first training begins"


def _from_last(t: Any, folder: Path, way: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    with warned() as said:
        state = t.resumed("single", "last", None, t.ModelCheckpoint(folder), **way).state
    return state, said


@on_ranks(1)
def test_trap_4_what_a_save_needs_beside_the_checkpoint_does_not_count_as_one(tmp_path: Path) -> None:
    from dcp_plugin import events
    from tests.lightning import training as t

    def next_name(trainer: Any) -> str:
        return os.path.basename(trainer._checkpoint_connector.hpc_save_path(tmp_path))

    trainer = t.trainer_for("single", plugin=True, max_steps=3, default_root_dir=tmp_path)
    trainer.fit(t.Model(), t.plain_loader("single"))
    seen = []
    events.subscribe(lambda event: seen.append(next_name(trainer)) if isinstance(event, events.BytesWritten) else None)
    for _ in range(2):
        trainer.save_checkpoint(trainer._checkpoint_connector.hpc_save_path(tmp_path))
    assert set(seen) == {"hpc_ckpt_1.ckpt", "hpc_ckpt_2.ckpt"}
    assert next_name(trainer) == "hpc_ckpt_3.ckpt"
    assert_same(t.whole_state(trainer), t.resumed("single", "hpc", default_root_dir=tmp_path, **OURS).state)
    (tmp_path / "hpc_ckpt_2.ckpt.tmp_7").mkdir()
    assert next_name(trainer) == "hpc_ckpt_3.ckpt"
    alone = type(trainer._checkpoint_connector).__mro__[1].hpc_save_path(tmp_path)
    assert os.path.basename(alone) == "hpc_ckpt_28.ckpt", "what a temporary directory beside it does to Lightning alone"


@on_ranks(2)
def test_trap_8_strict_loading_is_honoured_when_the_model_is_sharded(tmp_path: Path) -> None:
    from tests.lightning import training as t

    class Adapted(t.Model):
        strict_loading = False

        def __init__(self) -> None:
            super().__init__("fsdp2", seed=5)
            self.net.head.adapter = torch.nn.Linear(1, 1)

    saved = t.saved("fsdp2", tmp_path / "stock", **STOCK)
    with pytest.raises(BaseException, match="adapter"):  # torch's own derives from that
        t.resumed("fsdp2", tmp_path / "stock", Adapted(), **STOCK)
    saved = t.saved("fsdp2", tmp_path / "ours", **OURS)
    loaded = t.resumed("fsdp2", tmp_path / "ours", Adapted(), **OURS).state
    assert not _differ(saved, loaded)


@on_ranks(2)
def test_trap_9_a_validation_does_not_ask_for_optimizers(tmp_path: Path) -> None:
    from tests.lightning import training as t

    class Validated(t.Model):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("loss", self.net(batch[0]).square().mean(), sync_dist=True)

        test_step = validation_step

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch[0])

    batches = t.DataLoader(t.data(12), batch_size=2)
    for name, way in (("stock", STOCK), ("ours", OURS)):
        best = t.ModelCheckpoint(tmp_path / name, save_weights_only=True)
        trainer = t.trainer_for("fsdp2", [best], max_epochs=2, max_steps=-1, **way)
        trainer.fit(Validated("fsdp2"), t.plain_loader("fsdp2"), batches)
        if way is STOCK:
            with pytest.raises(KeyError):  # it asks the old optimizers for the parameters of the new module
                trainer.validate(Validated("fsdp2", 5), batches, ckpt_path="best", verbose=False)
            continue
        trained = [{"loss": trainer.callback_metrics["loss"].item()}]
        assert trainer.validate(Validated("fsdp2", 5), batches, ckpt_path="best", verbose=False) == trained
        other = t.trainer_for("fsdp2", **way)
        assert other.test(Validated("fsdp2", 5), batches, ckpt_path=best.best_model_path, verbose=False) == trained
        other = t.trainer_for("fsdp2", **way)
        predicted = other.predict(Validated("fsdp2", 5), batches, ckpt_path=best.best_model_path)
        mean = torch.cat([one.full_tensor() if hasattr(one, "full_tensor") else one for one in predicted])
        dist.all_reduce(total := mean.square().mean())
        assert torch.allclose(total / 2, torch.tensor(trained[0]["loss"]))


def test_trap_11_on_load_checkpoint_sees_what_it_sees_on_one_device(tmp_path: Path) -> None:
    ((alone,),) = launch.run(_all_on_load, 1, tmp_path, [("single", OURS)])
    ways = [("fsdp2", STOCK), ("ddp", OURS), ("fsdp1", OURS), ("fsdp2", OURS)]
    stock, *ours = launch.run(_all_on_load, 2, tmp_path, ways)[0]
    assert "state_dict" not in stock
    assert ours == [alone] * 3


def _all_on_load(root: Path, ways: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    from tests.lightning import training as t

    class Looking(t.Model):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.handed: dict[str, Any] = dict.fromkeys(checkpoint)
            for key, value in checkpoint.get("state_dict", {}).items():
                self.handed[f"state_dict.{key}"] = tuple(value.size())
            for state in checkpoint.get("optimizer_states", ()):
                self.handed["trained"] = sorted(state["state"])

    warnings.simplefilter("ignore")
    handed = []
    for layout, way in ways:
        path, model = root / f"{layout}-{way == OURS}", Looking(layout, seed=5)
        t.saved(layout, path, **way)
        t.resumed(layout, path, model, **way)
        handed.append(model.handed)
    return handed


@on_ranks(2)
def test_trap_12_each_rank_continues_in_its_own_data(tmp_path: Path) -> None:
    from tests.lightning import training as t

    class Reading(t.Model):
        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            seen.append(float(batch[0][0, 0]))
            return super().training_step(batch, batch_idx)

    class Numbers(Stream):
        def __len__(self) -> int:  # without it Lightning reads a batch ahead
            return 100

    def own_numbers() -> Any:
        numbers = Numbers(1000, lambda number: [torch.full((6,), float(number))])
        numbers.load_state_dict({"position": 100 * dist.get_rank()})
        return t.StatefulDataLoader(numbers, batch_size=1)

    own = [100.0 * dist.get_rank() + number for number in (4, 5, 6)]
    for name, way in (("stock", STOCK), ("ours", OURS)):
        seen: list[float] = []
        trainer = t.trainer_for("ddp", max_steps=3, **way)
        trainer.fit(Reading("ddp"), own_numbers())
        trainer.save_checkpoint(tmp_path / name)
        seen.clear()
        trainer = t.trainer_for("ddp", **way)
        trainer.fit(Reading("ddp"), own_numbers(), ckpt_path=tmp_path / name)
        # Stock gives the data of rank 0 to every rank.
        assert (seen == own) is (way is OURS or dist.get_rank() == 0)


@pytest.mark.one_of
@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_trap_13_one_failing_rank_does_not_wait_for_the_others_to_save(tmp_path: Path, layout: str) -> None:
    outcomes = launch.outcomes_of(_one_rank_fails, 2, tmp_path, layout, STOCK)
    assert "ArithmeticError: of rank 1" not in outcomes[1].traceback.splitlines()[-1], "another error hides it"
    outcomes = launch.outcomes_of(_one_rank_fails, 2, tmp_path, layout, OURS)
    assert outcomes[1].traceback.splitlines()[-1] == "ArithmeticError: of rank 1"
    assert not list(tmp_path.glob("ours/*.ckpt"))


def _one_rank_fails(root: Path, layout: str, way: dict[str, Any]) -> None:
    from dcp_plugin.lightning import model_checkpoint
    from tests.lightning import training as t

    # For one with another timeout. In a store of its own: in that of the first one rank 1 may still find, and call,
    # the address that rank 0 had there.
    rank, store = dist.get_rank(), dist.FileStore(str(root / f"meeting-{'ours' if way == OURS else 'stock'}"), 2)
    dist.destroy_process_group()
    waits = timedelta(seconds=HANG if way == OURS else 4)  # Lightning alone waits for as long in its save
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=waits)

    class Failing(t.Model):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if self.global_step == 2 and dist.get_rank() == 1:
                raise ArithmeticError("of rank 1")

    model_checkpoint._PATIENCE_WITH_AN_EXCEPTION = 1.0  # in this process: the other rank does not come
    plugin = way == OURS and t.DCPCheckpointIO()
    saving = t.ModelCheckpoint(root / ("ours" if plugin else "stock"), save_on_exception=True)
    trainer = t.trainer_for(layout, [saving], stock=not plugin, plugin=plugin)
    trainer.fit(Failing(layout), t.plain_loader(layout, 6))


@on_ranks(2)
def test_when_all_ranks_fail_what_they_have_is_saved(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import OnExceptionCheckpoint

    import dcp_plugin as dcp
    from tests.lightning import training as t

    class Failing(t.Model):
        def on_train_batch_start(self, *args: Any) -> None:
            if self.global_step == 2:
                raise ArithmeticError("of all ranks")

    for layout, background in (("ddp", False), ("fsdp1", True), ("fsdp2", True)):
        callbacks = [t.ModelCheckpoint(tmp_path / layout, save_on_exception=True, save_last="link")]
        callbacks += [OnExceptionCheckpoint(tmp_path / layout)]
        trainer = t.trainer_for(layout, callbacks, plugin=t.DCPCheckpointIO(async_save=background))
        with pytest.raises(ArithmeticError, match="of all ranks"):
            trainer.fit(Failing(layout), t.plain_loader(layout, 6))
        for name in ("epoch=0-step=2.ckpt", "last.ckpt", "on_exception.ckpt"):
            assert dcp.inspect(tmp_path / layout / name).step == 2


@on_ranks(2)
def test_exceptions_at_different_steps_make_no_checkpoint(tmp_path: Path) -> None:
    """It would have the parts of one step from one rank, and those of another step from another."""
    from tests.lightning import training as t

    class Failing(t.Model):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if self.global_step == 2 and dist.get_rank() == 0:
                raise ArithmeticError("before the step")

        def on_train_batch_end(self, *args: Any) -> None:
            if self.global_step == 3:
                raise ArithmeticError("after the step")

    for layout in ("ddp", "fsdp2"):
        trainer = t.trainer_for(layout, [t.ModelCheckpoint(tmp_path / layout, save_on_exception=True)])
        with pytest.raises(ArithmeticError), pytest.warns(UserWarning, match="at the same step"):
            trainer.fit(Failing(layout), t.plain_loader(layout, 6))
    dist.barrier()
    assert not list(tmp_path.glob("**/*.ckpt"))


@on_ranks(2)
def test_a_first_load_that_fails_is_no_exception_to_save(tmp_path: Path) -> None:
    """Nothing is trained yet, so nobody misses a checkpoint of it."""
    from lightning.pytorch.callbacks import OnExceptionCheckpoint

    import dcp_plugin as dcp
    from tests.lightning import training as t

    for layout in ("ddp", "fsdp2"):
        callbacks = [
            t.ModelCheckpoint(tmp_path / layout, save_on_exception=True),
            OnExceptionCheckpoint(tmp_path / layout),
        ]
        trainer = t.trainer_for(layout, callbacks)
        with warned("of its exception") as said, pytest.raises(dcp.CheckpointNotFound):
            trainer.fit(t.Model(layout), t.plain_loader(layout), ckpt_path=str(tmp_path / "nothing"))
        assert not said


def test_an_exception_waits_for_nobody_if_nothing_is_saved_because_of_it(tmp_path: Path) -> None:
    outcomes = launch.outcomes_of(_fails_alone, 2, tmp_path)
    assert outcomes[1].result == "of rank 1"


def _fails_alone(root: Path) -> str:
    from lightning.pytorch.callbacks import Checkpoint

    from dcp_plugin.lightning import model_checkpoint
    from tests.lightning import training as t

    class Failing(t.Model):
        def on_train_batch_start(self, *args: Any) -> None:
            if dist.get_rank() == 1:
                raise ArithmeticError("of rank 1")

    trainer = t.trainer_for("ddp", [t.ModelCheckpoint(root), Checkpoint()])
    model_checkpoint._all_ranks_come_to_save = lambda trainer, io: pytest.fail("the ranks meet")
    try:
        trainer.fit(Failing("ddp"), t.plain_loader("ddp"))
    except ArithmeticError as error:
        return str(error)
    return ""


@on_ranks(2)
def test_trap_14_loggers_are_told_of_a_checkpoint_when_it_is_there(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger
    from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

    import dcp_plugin as dcp
    from dcp_plugin import events
    from tests.lightning import training as t
    from tests.slowness import pause

    class SlowIO(TorchCheckpointIO):
        def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            told.wait(HANG)
            super().save_checkpoint(*args, **kwargs)

    class Told(CSVLogger):
        def after_save_checkpoint(self, callback: Any) -> None:
            there.append(os.path.exists(callback.best_model_path))
            told.set()
            if plugin is not None and there[-1]:
                assert dcp.inspect(callback.best_model_path).step

    events.subscribe(pause(0.2))
    for plugin in (None, t.DCPCheckpointIO(async_save=True)):
        told = threading.Event()
        there: list[bool] = []
        saving = t.ModelCheckpoint(tmp_path / str(plugin is None), every_n_train_steps=6 if plugin is None else 3)
        stock = {"plugins": [AsyncCheckpointIO(SlowIO())]} if plugin is None else {}
        trainer = t.trainer_for("ddp", [saving], stock=plugin is None, plugin=plugin, logger=Told(tmp_path), **stock)
        trainer.fit(t.Model("ddp"), t.plain_loader("ddp"))
        if dist.get_rank() == 0:
            assert there == ([False] if plugin is None else [True, True]), (plugin, there)
        else:
            assert there == []


@on_ranks(1)
def test_trap_15_in_the_background_old_checkpoints_are_deleted_and_failures_are_told(tmp_path: Path) -> None:
    from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

    from dcp_plugin import SaveFailed, events
    from tests.lightning import training as t
    from tests.slowness import pause

    class SlowIO(TorchCheckpointIO):
        def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            pause(0.1)()
            super().save_checkpoint(*args, **kwargs)

    events.subscribe(pause(0.1))

    def train(name: str, **options: Any) -> list[str]:
        saving = t.ModelCheckpoint(tmp_path / name, "{step}", every_n_train_steps=1)
        t.trainer_for("single", [saving], max_steps=4, **options).fit(t.Model(), t.plain_loader("single", 6))
        return names_in(tmp_path / name)

    assert len(train("stock", stock=True, plugins=[AsyncCheckpointIO(SlowIO())])) > 1
    assert train("ours", plugin=t.DCPCheckpointIO(async_save=True)) == ["step=4.ckpt"]

    fill_disk(step=3)
    with pytest.raises(SaveFailed, match="disk full"):
        train("failed", plugin=t.DCPCheckpointIO(async_save=True))
    assert (tmp_path / "failed" / "step=2.ckpt").exists(), "the one that would have been replaced"
