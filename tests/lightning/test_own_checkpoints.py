"""A run resumes from its own checkpoint where stock does: compiled parts, pruning, loose parameters, and hooks that
change a checkpoint. Each script runs with stock and with ours."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.compare import assert_same, full
from tests.launch import on_ranks, run
from tests.lightning import LIGHTNING, TRUSTED
from tests.lightning.test_same_as_stock import assert_same_run
from tests.training import WORLD_SIZE

Hook = Callable[[dict[str, Any]], object]


def _nothing(checkpoint: dict[str, Any]) -> None:
    pass


def model_class(
    *,
    compiled: bool = False,
    save: Hook = _nothing,
    load: Hook = _nothing,
) -> type[Any]:
    """A module without random numbers, perhaps with compiled parts, and with these hooks."""
    from tests.lightning import stock_training as stock

    class Model(stock.Trained):
        def __init__(self, layout: str = "single", seed: int = 0) -> None:
            super().__init__(layout, seed)
            body = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
            self.net = nn.Sequential(OrderedDict(body=body, head=nn.Linear(6, 1)))
            if compiled:
                self.net.body = torch.compile(body, backend="eager")

        def make_optimizer(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.net.parameters(), lr=0.01)

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            save(checkpoint)

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            load(checkpoint)

    return Model


def manual(**hooks: Hook) -> type[Any]:
    """A module with two optimizers."""

    class Manual(model_class(**hooks)):  # type: ignore[misc]
        def __init__(self, layout: str = "single", seed: int = 0) -> None:
            super().__init__(layout, seed)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(super().training_step(batch, batch_idx))
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()

        def configure_optimizers(self) -> Any:
            return [torch.optim.AdamW(part.parameters(), lr=0.01) for part in (self.net.body, self.net.head)]

    return Manual


def resumed(
    root: Path,
    stock: bool,
    kind: Callable[..., Any],
    callbacks: Callable[[], list[Any]] = list,
    layout: str = "single",
    **options: Any,
) -> Any:
    """Train an epoch, and a second one from its checkpoint; return the resumed trainer and module."""
    from dcp_plugin.lightning import DCPCheckpointIO
    from tests.lightning import stock_training as t

    def fit(epochs: int, seed: int, path: Path | None, *more: Any, **how: Any) -> Any:
        plugins = None if stock else [DCPCheckpointIO()]
        return t.fit(layout, epochs, seed, path, [*callbacks(), *more], plugins, kind, **how)

    fit(1, 0, None, t.first_checkpoint(root))
    return fit(2, 5, root / "first.ckpt", **options)


def losses(root: Path, stock: bool, *args: Any, **options: Any) -> list[float]:
    return resumed(root, stock, *args, **options)[1].losses  # type: ignore[no-any-return]


@pytest.mark.skipif(LIGHTNING < (2, 6), reason="Lightning 2.5 has no EMAWeightAveraging")
@on_ranks(1)
def test_averaged_weights_of_a_compiled_part_resume(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import EMAWeightAveraging

    kind = model_class(compiled=True)
    script = lambda root, stock: losses(root, stock, kind, lambda: [EMAWeightAveraging(decay=0.5)])  # noqa: E731
    assert len(assert_same_run(tmp_path, script)) == 3


@pytest.mark.parametrize("layout", ["single", "ddp"])
@on_ranks(of=lambda layout: WORLD_SIZE[layout])
def test_hooks_see_the_keys_of_state_dict_and_write_them(tmp_path: Path, layout: str) -> None:
    def script(root: Path, stock: bool) -> Any:
        seen: list[Any] = []

        class Model(model_class(compiled=True)):  # type: ignore[misc]
            def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
                seen.append(list(checkpoint["state_dict"]))
                checkpoint["state_dict"] = {key: value / 2 for key, value in self.state_dict().items()}

            def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
                seen.append(list(checkpoint["state_dict"]))
                known = self.state_dict()
                checkpoint["state_dict"] = {k: v for k, v in checkpoint["state_dict"].items() if k in known}

        return losses(root / "checkpoints", stock, Model, layout=layout), seen

    _, seen = assert_same_run(tmp_path, script)
    assert "net.body._orig_mod.0.weight" in seen[0]


@on_ranks(2)
def test_a_hook_of_a_sharded_model_may_write_the_keys_of_state_dict(tmp_path: Path) -> None:
    """Stock stores these keys, and asks for others at the resume."""

    class Model(model_class(compiled=True)):  # type: ignore[misc]
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["state_dict"] = self.state_dict()

    written = losses(tmp_path / "written", False, Model, layout="fsdp2")
    assert written == losses(tmp_path / "as given", False, model_class(compiled=True), layout="fsdp2")


@on_ranks(1)
def test_two_keys_that_would_be_stored_as_one_are_named(tmp_path: Path) -> None:
    from dcp_plugin import CheckpointMismatch

    def save(checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"]["net.body.0.bias"] = torch.zeros(6)

    with pytest.raises(CheckpointMismatch, match=r"net\.body\._orig_mod\.0\.bias and net\.body\.0\.bias"):
        losses(tmp_path, False, model_class(compiled=True, save=save))


@on_ranks(1)
def test_a_compiled_checkpoint_loads_uncompiled_and_by_its_class(tmp_path: Path) -> None:
    from dcp_plugin.lightning import load_from_checkpoint

    kind, plain = model_class(compiled=True), model_class()
    _, trained = resumed(tmp_path, False, kind)
    keep = tmp_path / "first.ckpt"
    loaded = [kind.load_from_checkpoint(keep), load_from_checkpoint(kind, keep)]
    assert_same(loaded[0].state_dict(), loaded[1].state_dict())
    assert "net.body._orig_mod.0.weight" in trained.state_dict()
    from dcp_plugin.lightning import DCPCheckpointIO
    from tests.lightning import stock_training as t

    _, model = t.fit("single", 2, 5, keep, plugins=[DCPCheckpointIO()], kind=plain)
    assert model.losses == trained.losses


@on_ranks(1)
def test_on_load_checkpoint_may_start_optimizers_and_schedules_fresh(tmp_path: Path) -> None:
    def empty(checkpoint: dict[str, Any]) -> None:
        checkpoint["optimizer_states"] = []
        checkpoint["lr_schedulers"] = []

    def fresh_in_place(checkpoint: dict[str, Any]) -> None:
        checkpoint["optimizer_states"][0]["state"].clear()

    def first_only(checkpoint: dict[str, Any]) -> None:
        del checkpoint["optimizer_states"][1]

    changed = {}
    for name, kind in {
        "empty": model_class(load=empty),
        "in place": model_class(load=fresh_in_place),
        "saved empty": model_class(save=empty),
        "one of two": manual(load=first_only),
        "unchanged": model_class(),
    }.items():
        changed[name] = assert_same_run(tmp_path / name, lambda root, stock, kind=kind: losses(root, stock, kind))
    assert changed["empty"] != changed["in place"] != changed["unchanged"]


@on_ranks(2)
def test_a_sharded_strategy_keeps_the_optimizers_that_a_hook_empties(tmp_path: Path) -> None:
    def empty(checkpoint: dict[str, Any]) -> None:
        checkpoint["optimizer_states"] = []
        checkpoint["lr_schedulers"] = []

    def pop(checkpoint: dict[str, Any]) -> None:
        checkpoint.pop("optimizer_states", None)

    for name, hook in {"empty": empty, "pop": pop}.items():
        kind = model_class(load=hook)
        assert_same_run(tmp_path / name, lambda root, stock, kind=kind: losses(root, stock, kind, layout="fsdp2"))


@on_ranks(1)
def test_another_number_of_optimizers_is_still_refused(tmp_path: Path) -> None:
    from dcp_plugin import CheckpointMismatch
    from dcp_plugin.lightning import DCPCheckpointIO
    from tests.lightning import stock_training as t

    resumed(tmp_path, False, model_class())
    for kind in (manual(), manual(load=lambda checkpoint: None)):
        with pytest.raises(CheckpointMismatch, match=r"has the state of 1 optimizer\(s\), this training has 2"):
            t.fit("single", 2, 5, tmp_path / "first.ckpt", plugins=[DCPCheckpointIO()], kind=kind)


@on_ranks(1)
def test_loops_that_on_load_checkpoint_resets_start_again(tmp_path: Path) -> None:
    def reset(checkpoint: dict[str, Any]) -> None:
        progress = checkpoint["loops"]["fit_loop"]["epoch_progress"]
        for counts in (progress["current"], progress["total"]):
            counts.update(dict.fromkeys(counts, 0))

    def pop(checkpoint: dict[str, Any]) -> None:
        del checkpoint["loops"]

    lengths = {}
    for name, hook in {"reset": reset, "pop": pop, "nothing": _nothing}.items():

        def script(root: Path, stock: bool, hook: Hook = hook) -> Any:
            trainer, model = resumed(root, stock, model_class(load=hook))
            return model.losses, trainer.current_epoch, trainer.global_step

        lengths[name] = len(assert_same_run(tmp_path / name, script)[0])
    assert lengths == {"reset": 6, "pop": 6, "nothing": 3}


@pytest.mark.parametrize("layout", ["single", "ddp"])
@on_ranks(of=lambda layout: WORLD_SIZE[layout])
def test_a_pruned_model_resumes(tmp_path: Path, layout: str) -> None:
    from lightning.pytorch.callbacks import ModelPruning

    pruning = lambda: [ModelPruning("l1_unstructured", amount=0.5)]  # noqa: E731
    script = lambda root, stock: losses(root, stock, model_class(), pruning, layout)  # noqa: E731
    assert len(assert_same_run(tmp_path, script)) == 3


@pytest.mark.parametrize("layout", ["single", "ddp"])
@on_ranks(of=lambda layout: WORLD_SIZE[layout])
def test_an_optimizer_of_loose_parameters_resumes(tmp_path: Path, layout: str) -> None:
    class Model(model_class()):  # type: ignore[misc]
        def __init__(self, layout: str = "single", seed: int = 0) -> None:
            super().__init__(layout, seed)
            self.loose = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]  # in no module

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) + sum(p.square().sum() for p in self.loose)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW([*self.net.parameters(), *self.loose], lr=0.01)

    def script(root: Path, stock: bool) -> Any:
        trainer, model = resumed(root, stock, Model, layout=layout)
        (optimizer,) = trainer.optimizers
        return model.losses, [optimizer.state[p]["exp_avg"].tolist() for p in model.loose]

    assert_same_run(tmp_path, script)


@on_ranks(1)
def test_an_optimizer_of_loose_parameters_alone_resumes(tmp_path: Path) -> None:
    class Model(manual()):  # type: ignore[misc]
        def __init__(self, layout: str = "single", seed: int = 0) -> None:
            super().__init__(layout, seed)
            self.temperature = [nn.Parameter(torch.ones(1))]

        def manual_backward(self, loss: Any) -> None:
            super().manual_backward(loss * self.temperature[0].sum())

        def configure_optimizers(self) -> Any:
            return [torch.optim.AdamW(params, lr=0.01) for params in (self.net.parameters(), self.temperature)]

    def script(root: Path, stock: bool) -> Any:
        trainer, model = resumed(root, stock, Model)
        return model.losses, trainer.optimizers[1].state[model.temperature[0]]["exp_avg"].tolist()

    assert_same_run(tmp_path, script)


@pytest.mark.parametrize("saved_in", ["on_train_batch_end", "on_validation_end"])
@on_ranks(1)
def test_a_schedule_on_a_metric_steps_for_the_batch_of_the_checkpoint(tmp_path: Path, saved_in: str) -> None:
    """Stock loses this step, so the oracle is a run without interruption."""
    from lightning.pytorch.callbacks import Callback

    from dcp_plugin.lightning import DCPCheckpointIO
    from tests.lightning import stock_training as t

    class Save(Callback):
        pass

    def save(self: Any, trainer: Any, *args: Any) -> None:
        trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")

    setattr(Save, saved_in, save)

    class Model(model_class()):  # type: ignore[misc]
        def __init__(self, layout: str = "single", seed: int = 0) -> None:
            super().__init__(layout, seed)
            self.rates: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.rates.append(self.optimizers().param_groups[0]["lr"])
            if saved_in == "on_train_batch_end":
                self.log("flat", 1.0)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            if saved_in == "on_validation_end":
                self.log("flat", 1.0)

        def configure_optimizers(self) -> Any:
            optimizer = self.make_optimizer()
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
            how = {"scheduler": schedule, "interval": "step", "monitor": "flat"}
            return {"optimizer": optimizer, "lr_scheduler": how}

    def fit(seed: int, path: Path | None, *callbacks: Any) -> Any:
        limits: dict[str, Any] = {"val_check_interval": 1, "num_sanity_val_steps": 0, "max_epochs": 2}
        trainer = t.trainer_for("single", callbacks, plugins=[DCPCheckpointIO()], **limits)
        model = Model("single", seed)
        trainer.fit(model, *[t.DataLoader(t.samples(6), batch_size=2) for _ in range(2)], ckpt_path=path)
        return model

    whole = fit(0, None, Save())
    for step in (1, 2, 3, 4, 5):
        model = fit(5, tmp_path / f"{step}.ckpt")
        if step < 3:  # a plain loader starts an epoch again after a checkpoint within it
            count = 3 - step
            assert model.rates[:count] == whole.rates[step:3]
        assert model.optimizers().param_groups[0]["lr"] == whole.optimizers().param_groups[0]["lr"], step


@on_ranks(1)
def test_mappings_among_hyper_parameters_keep_their_class(tmp_path: Path) -> None:
    import lightning.pytorch as pl

    from dcp_plugin.lightning import DCPCheckpointIO, load_from_checkpoint
    from tests.messages import warned

    class Model(pl.LightningModule):
        def __init__(self, **values: Any) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.values = values
            self.layer = nn.Linear(1, 1)

    given = {
        "ordered": OrderedDict(b=1, a=OrderedDict(c=2)),
        "counts": Counter("aab"),
        "lists": defaultdict(list, {"x": [1]}),
        "plain": {"inside": [OrderedDict(z=1)]},
    }

    def script(root: Path, stock: bool) -> Any:
        plugins = None if stock else [DCPCheckpointIO()]
        trainer = pl.Trainer(accelerator="cpu", logger=False, plugins=plugins, enable_progress_bar=False)
        trainer.strategy.connect(Model(**given))
        trainer.save_checkpoint(root / "x.ckpt")
        return repr(Model.load_from_checkpoint(root / "x.ckpt", **TRUSTED).values)

    assert_same_run(tmp_path, script)

    trainer = pl.Trainer(accelerator="cpu", logger=False, plugins=[DCPCheckpointIO()], enable_progress_bar=False)
    trainer.strategy.connect(Model(made=defaultdict(lambda: 3, x=1)))
    with warned("its factory is code") as said:
        trainer.save_checkpoint(tmp_path / "factory.ckpt")
    assert said
    assert load_from_checkpoint(Model, tmp_path / "factory.ckpt").values == {"made": {"x": 1}}


@pytest.mark.parametrize("layout", ["single", "ddp"])
@on_ranks(of=lambda layout: WORLD_SIZE[layout])
def test_optimizer_states_have_numbers_where_hooks_look(tmp_path: Path, layout: str) -> None:
    def halve(checkpoint: dict[str, Any]) -> None:
        (state,) = checkpoint["optimizer_states"]
        assert set(state["state"]) == {0, 1, 2, 3}
        assert state["param_groups"][0]["params"] == [0, 1, 2, 3]
        state["state"][2] = {**state["state"][2], "exp_avg": state["state"][2]["exp_avg"] / 2}
        state["param_groups"][0]["weight_decay"] = 0.5

    for name, kind in {"save": model_class(save=halve), "load": model_class(load=halve)}.items():
        assert_same_run(tmp_path / name, lambda root, stock, kind=kind: losses(root, stock, kind, layout=layout))


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
@on_ranks(1)
def test_lightnings_own_load_from_checkpoint_opens_the_best_checkpoint(tmp_path: Path, package: str) -> None:
    import importlib

    pl: Any = importlib.import_module(package)
    from dcp_plugin.lightning import DCPCheckpointIO

    boring = importlib.import_module(f"{package}.demos.boring_classes")

    class Model(boring.BoringModel):  # type: ignore[misc, name-defined]
        def __init__(self, width: int = 1, scale: float = 1.0) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.seen: Any = None

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.seen = checkpoint["optimizer_states"][0]["param_groups"][0]["params"]

    def script(root: Path, stock: bool) -> Any:
        plugins = [] if stock else [DCPCheckpointIO()]
        keep = pl.callbacks.ModelCheckpoint(root, filename="best")
        shown = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = pl.Trainer(accelerator="cpu", max_epochs=1, callbacks=[keep], plugins=plugins, **shown)
        torch.manual_seed(0)
        trainer.fit(Model(width=3))
        loaded = Model.load_from_checkpoint(keep.best_model_path, scale=2.0, map_location="cpu")
        with pytest.raises(RuntimeError, match="Missing key"):
            type("More", (Model,), {"__init__": _with_one_more(Model)}).load_from_checkpoint(keep.best_model_path)
        with pytest.raises(FileNotFoundError):
            Model.load_from_checkpoint(root / "none.ckpt")
        return dict(loaded.hparams), loaded.seen, {k: v.tolist() for k, v in loaded.state_dict().items()}

    assert_same_run(tmp_path, script)


def _with_one_more(base: Any) -> Any:
    def init(self: Any, **values: Any) -> None:
        base.__init__(self, **values)
        self.more = nn.Linear(1, 1)

    return init


def _fit_with_average(root: Path, layout: str, saved_by: str | None) -> None:
    from lightning.pytorch.callbacks import Callback
    from torch.distributed.tensor import DTensor

    from dcp_plugin.lightning import DCPCheckpointIO
    from tests.lightning import stock_training as t

    class Average(Callback):
        """As public scripts write it for sharded models: full tensors by the names of the parameters."""

        average: Any = None

        def on_train_start(self, trainer: Any, module: Any) -> None:
            if saved_by is not None:
                kinds = {isinstance(value, DTensor) for value in self.average.values()}
                assert kinds == {layout == "fsdp2" != saved_by}, "without a record it is laid out like the parameters"
                self.average = {name: full(value) for name, value in self.average.items()}
                assert_same(torch.load(root / f"{saved_by}.pt"), self.average)

        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            now = {name: full(parameter.detach()).clone() for name, parameter in module.named_parameters()}
            before = self.average or now
            self.average = {name: before[name].lerp(value, 0.5) for name, value in now.items()}

        def state_dict(self) -> dict[str, Any]:
            return {"average": self.average}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.average = state["average"]

    callbacks = [average := Average(), *([] if saved_by else [t.first_checkpoint(root / layout)])]
    path = root / saved_by / "first.ckpt" if saved_by else None
    t.fit(layout, 2 if saved_by else 1, 5, path, callbacks, [DCPCheckpointIO()], model_class())
    if not saved_by:
        torch.save(average.average, root / f"{layout}.pt")


@pytest.mark.one_of("resumed_by")
@pytest.mark.parametrize("saved_by", ["single", "ddp", "fsdp2"])
@pytest.mark.parametrize("resumed_by", ["single", "ddp", "fsdp2"])
def test_full_averages_stay_full(tmp_path: Path, saved_by: str, resumed_by: str) -> None:
    run(_fit_with_average, WORLD_SIZE[saved_by], tmp_path, saved_by, None)
    run(_fit_with_average, WORLD_SIZE[resumed_by], tmp_path, resumed_by, saved_by)


def test_full_averages_of_a_sharded_model_stay_full(tmp_path: Path) -> None:
    run(_fit_with_average, 2, tmp_path, "fsdp2", None)
    run(_fit_with_average, 2, tmp_path, "fsdp2", "fsdp2")
