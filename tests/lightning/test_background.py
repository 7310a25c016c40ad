"""``async_save=True`` under a real trainer: nothing is lost, deleted too early, or kept silent."""

from __future__ import annotations

import signal
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp_plugin as dcp
from dcp_plugin.core.paths import Where
from tests.compare import assert_same
from tests.damage import fill_disk
from tests.launch import on_ranks
from tests.limits import HANG
from tests.programs import LIGHTNING, Program


def _saving_often(root: Path, **options: Any) -> Any:
    from lightning.pytorch.callbacks import ModelCheckpoint

    return ModelCheckpoint(root, filename="{step}", every_n_train_steps=1, **options)


@pytest.mark.one_of
@pytest.mark.parametrize("layout", ["ddp", "fsdp1", "fsdp2"])
@on_ranks(2)
def test_a_training_with_background_saves_resumes_like_any_other(place: Where, layout: str) -> None:
    from tests.lightning import training as t

    straight, model = t.trainer_for(layout), t.Model(layout)
    straight.fit(model, t.stateful_loader(layout))
    io = t.DCPCheckpointIO(async_save=True)
    first = t.trainer_for(layout, [_saving_often(place / layout, save_top_k=-1)], plugin=io, max_steps=5)
    first.fit(t.Model(layout), t.stateful_loader(layout))
    assert not any(thread.name == "dcp-save" for thread in threading.enumerate())
    second, resumed = t.trainer_for(layout, plugin=io), t.Model(layout, seed=5)
    second.fit(resumed, t.stateful_loader(layout), ckpt_path=str(place / layout / "step=2.ckpt"))
    assert resumed.losses == model.losses[2:]
    assert_same(t.whole_state(straight), t.whole_state(second))


@on_ranks(2)
def test_the_old_checkpoint_is_deleted_when_the_new_one_is_there(tmp_path: Path) -> None:
    import dcp_plugin as dcp
    from dcp_plugin import events
    from tests.lightning import training as t

    loadable: list[int] = []

    def look(event: events.Event) -> None:
        if isinstance(event, events.BytesWritten):
            loadable.append(sum(state.committed for state in dcp.list_checkpoints(tmp_path)))

    events.subscribe(look)
    trainer = t.trainer_for("ddp", [_saving_often(tmp_path, save_top_k=1)], plugin=t.DCPCheckpointIO(async_save=True))
    trainer.fit(t.Model("ddp"), t.plain_loader("ddp"))
    first_save = loadable.count(0)
    assert all(loadable[first_save:]), f"a save began with nothing to fall back to: {loadable}"
    torch.distributed.barrier()
    assert [state.path.name for state in dcp.list_checkpoints(tmp_path)] == ["step=6.ckpt"]


@on_ranks(2)
def test_a_failed_background_save_ends_the_training_and_is_raised_once(tmp_path: Path) -> None:
    from dcp_plugin import CheckpointError
    from tests.lightning import training as t

    fill_disk(step=6)
    io = t.DCPCheckpointIO(async_save=True)
    trainer = t.trainer_for("fsdp2", [_saving_often(tmp_path, save_top_k=-1)], plugin=io)
    with pytest.raises(CheckpointError, match="disk full"):
        trainer.fit(t.Model("fsdp2"), t.plain_loader("fsdp2"))
    io.teardown()


@on_ranks(2)
def test_the_trainings_own_exception_comes_first(tmp_path: Path) -> None:
    from tests.lightning import training as t

    class Diverging(t.Model):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if self.global_step == 3:
                raise ArithmeticError("the loss is NaN")

    fill_disk(step=3)
    io = t.DCPCheckpointIO(async_save=True)
    trainer = t.trainer_for("fsdp2", [_saving_often(tmp_path, save_top_k=-1)], plugin=io)
    warnings.simplefilter("ignore")  # it warns, too
    with pytest.raises(ArithmeticError, match="the loss is NaN") as raised:
        trainer.fit(Diverging("fsdp2"), t.plain_loader("fsdp2"))
    assert "disk full" in raised.value.__notes__[0]
    io.teardown()


@pytest.mark.one_of
@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
@on_ranks(2)
def test_lazy_copies_run_beside_forward_and_backward_and_hold_what_was_saved(tmp_path: Path, layout: str) -> None:
    """The copy is held back until the next forward pass has run, which Lightning runs inside the optimizer's step."""
    from dcp_plugin.lightning import DCPCheckpointIO
    from tests.lightning import training as t
    from tests.slowness import slow_copies

    forward = threading.Event()

    class Watched(t.Model):
        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            forward.set()
            return loss

    def wait_for_forward() -> None:
        assert forward.wait(HANG), "the optimizer's step waits for the copy before it runs the closure"

    class Saving(t.Callback):  # type: ignore[name-defined, misc]
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step < trainer.max_steps:  # no forward pass follows the last one
                forward.clear()
            states.append(t.whole_state(trainer))

    states: list[dict[str, Any]] = []
    straight, model = t.trainer_for(layout), t.Model(layout)
    straight.fit(model, t.stateful_loader(layout))
    io = DCPCheckpointIO(async_save=True, staging="lazy")
    with slow_copies(wait_for_forward):
        saving = _saving_often(tmp_path / layout, save_top_k=-1, save_on_train_epoch_end=False)
        trainer, watched = t.trainer_for(layout, [Saving(), saving], plugin=io), Watched(layout)
        trainer.fit(watched, t.stateful_loader(layout))
    assert watched.losses == model.losses
    for step in (1, 3, 5):
        at, resumed = t.AtTrainStart(), t.Model(layout, seed=5)
        second = t.trainer_for(layout, [at], plugin=io)
        second.fit(resumed, t.stateful_loader(layout), ckpt_path=str(tmp_path / layout / f"step={step}.ckpt"))
        assert_same(at.state, states[step - 1])


def test_sigterm_finishes_the_save_in_flight_before_lightning_ends_the_training(tmp_path: Path) -> None:
    training = Program("-c", _PREEMPTED, tmp_path, imported=LIGHTNING)
    assert "saving" in training.stdout.readline()
    training.send_signal(signal.SIGTERM)
    out, _ = training.communicate(timeout=HANG)
    assert "trained to the end" not in out and "ended by SIGTERM" in out
    newest = dcp.latest(tmp_path)
    assert newest is not None and dcp.verify(newest).ok
    assert dcp.inspect(newest).step == int(out.split("in flight: ")[1].split()[0])


_PREEMPTED = """
import sys, time
from lightning.pytorch.callbacks import Callback
from dcp_plugin import events
from tests.lightning import training as t
from tests.lightning.test_background import _saving_often

def slowly(event):
    if isinstance(event, events.SaveStarted) and event.step == 2:
        print("saving", flush=True)
        time.sleep(2.0)

class Slow(Callback):
    def on_train_batch_start(self, trainer, *args):
        if trainer.global_step == 2:
            for _ in range(100):
                time.sleep(0.02)

    def on_exception(self, trainer, module, exception):
        print("ended by", type(exception).__name__.removesuffix("Exception"), flush=True)
        print("in flight:", trainer.global_step, flush=True)

events.subscribe(slowly)
callbacks = [Slow(), _saving_often(sys.argv[1], save_top_k=-1)]
trainer = t.trainer_for("single", callbacks, plugin=t.DCPCheckpointIO(async_save=True))
trainer.fit(t.Model("single"), t.plain_loader("single"))
print("trained to the end", flush=True)
"""


@on_ranks(2)
def test_a_checkpoint_on_its_way_is_waited_for_by_who_loads_or_deletes_it(tmp_path: Path) -> None:
    from tests.lightning import training as t
    from tests.slowness import pause, slow_writes

    found: list[int] = []

    class AtOnce(t.Callback):  # type: ignore[name-defined, misc]
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 2:
                trainer.save_checkpoint(tmp_path / "loaded.ckpt")
                found.append(trainer.strategy.load_checkpoint(tmp_path / "loaded.ckpt")["global_step"])
                trainer.save_checkpoint(tmp_path / "deleted.ckpt")
                trainer.strategy.remove_checkpoint(tmp_path / "deleted.ckpt")

    straight, model = t.trainer_for("ddp"), t.Model("ddp")
    straight.fit(model, t.plain_loader("ddp"))
    with slow_writes(pause(0.1)):
        trainer, again = t.trainer_for("ddp", [AtOnce()], plugin=t.DCPCheckpointIO(async_save=True)), t.Model("ddp")
        trainer.fit(again, t.plain_loader("ddp"))
        trainer.save_checkpoint(tmp_path / "after.ckpt")
        assert (tmp_path / "after.ckpt").is_dir(), "nobody would wait for it later"
    assert found == [2]
    assert again.losses == model.losses
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix == ".ckpt") == ["after.ckpt", "loaded.ckpt"]
