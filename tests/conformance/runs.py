"""Corpus of runs: documented training loops of Lightning, Fabric, Accelerate and transformers, with and without ours.

An entry is one line of the tables below. The user's code is the same with both; where it asks for ``Ours`` is the line
that a user adds. The data has one value per sample and is not
shuffled: where the random numbers or the position of a loader come from is not what these compare.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.conformance.differences import NEXT_EPOCH_BEGUN, NO_EPOCH_SKIPPED, RESUMED_BY_ACCELERATE
from tests.conformance.entries import Entry
from tests.conformance.optimizers import Hybrid
from tests.conformance.tools import Ours, Tool
from tests.conformance.trace import Trace, note
from tests.places import names_in


@dataclass(frozen=True)
class RunEntry(Entry):
    code: Callable[[Tool, Trace], None]
    variants: tuple[str, ...] = ("plain",)


RUNS: dict[str, RunEntry] = {}


def _add(name: str, code: Any, differs: Mapping[str, str], **options: Any) -> None:
    """Add a function of a tool, a trace and these options to the corpus."""
    RUNS[name] = RunEntry(functools.partial(code, **options), differs=differs)


def run(entry: RunEntry, variant: str, tool: Tool, trace: Trace) -> None:
    entry.code(tool, trace)


def forget_process() -> None:
    """Forget what Accelerate keeps of a process: the user's next process begins without."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


class _Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))  # type: ignore[no-any-return]


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


# Lightning


def quiet() -> None:
    for name in ("lightning", "lightning.pytorch", "lightning.fabric", "dcp_plugin"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


@functools.cache
def _module() -> type[Any]:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        """Tells of every hook, and of what it sees of the training."""

        def __init__(self, optimizer: str = "adam", seed: int = 4) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = _Net(seed)

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            loss = self.net(batch[0]).square().mean()
            note("training_step", self.current_epoch, self.global_step, batch_idx, loss.item())
            self.log("loss", loss)
            return loss  # type: ignore[no-any-return]

        def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
            note("validation_step", self.current_epoch, self.global_step, batch_idx, self.training)
            self.log("val", 1 / (1.0 + self.global_step))

        def configure_optimizers(self) -> Any:
            optimizer = (_adam if self.hparams.optimizer == "adam" else Hybrid)(self)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
            return [optimizer], [{"scheduler": schedule, "interval": "epoch"}]

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            note("module on_save_checkpoint", sorted(checkpoint))
            checkpoint["mine"] = {"epoch": self.current_epoch, "note": "text"}

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            note("module on_load_checkpoint", checkpoint["mine"], sorted(checkpoint["state_dict"]))

    return Module


@functools.cache
def _watch() -> type[Any]:
    from lightning.pytorch.callbacks import Callback

    class Watch(Callback):
        """Tells of every hook that is called; saves, stops or raises in the one it is given."""

        def __init__(self, act: Callable[[Any], None] | None = None, hook: str = "", at: int = 1) -> None:
            self.act, self.hook, self.at, self.calls = act, hook, at, 0

        def state_dict(self) -> dict[str, Any]:
            note("callback state_dict")
            return {"calls": self.calls}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            note("callback load_state_dict", state_dict)

        def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
            note("on_save_checkpoint", sorted(checkpoint["loops"]["fit_loop"]), checkpoint["global_step"])

        def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
            note("on_load_checkpoint", checkpoint["global_step"], checkpoint["epoch"])

    def hook(name: str) -> Any:
        def tell(self: Any, trainer: Any, *args: Any, **kwargs: Any) -> None:
            note(name, trainer.current_epoch, trainer.global_step)
            if name == self.hook:
                self.calls += 1
                if self.calls == self.at:
                    self.act(trainer)

        return tell

    for name in LIGHTNING_HOOKS:
        setattr(Watch, name, hook(name))
    return Watch


LIGHTNING_HOOKS = (
    "setup", "teardown", "on_fit_start", "on_fit_end", "on_sanity_check_start", "on_sanity_check_end", "on_train_start",
    "on_train_end", "on_train_epoch_start", "on_train_epoch_end", "on_train_batch_start", "on_train_batch_end",
    "on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step",
    "on_validation_start", "on_validation_end", "on_validation_epoch_start", "on_validation_epoch_end",
    "on_validation_batch_start", "on_validation_batch_end",
)  # fmt: skip


def _loader(samples: int) -> Any:
    values = torch.arange(samples * 3.0).view(-1, 3) / 10
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(values), batch_size=2)


def _trainer(tool: Tool, callbacks: list[Any], **options: Any) -> Any:
    import lightning.pytorch as pl

    from dcp_plugin.lightning import DCPCheckpointIO

    defaults = {"max_epochs": 3, "logger": False, "accelerator": "cpu", "num_sanity_val_steps": 0, "devices": 1}
    shown = {"enable_progress_bar": False, "enable_model_summary": False}
    options = {**defaults, **shown, "default_root_dir": tool.folder, **options}
    return pl.Trainer(callbacks=callbacks, plugins=[DCPCheckpointIO()] if isinstance(tool, Ours) else [], **options)


def _fit(
    tool: Tool,
    trace: Trace,
    callbacks: Callable[[Path], list[Any]],
    resume: Callable[[Path, list[Any]], str],
    optimizer: str = "adam",
    first: Mapping[str, Any] | None = None,
    then: Mapping[str, Any] | None = None,
    watch: Any = None,
) -> None:
    """Train, and train again from what that has left: with the same callbacks, and one that sees everything."""
    quiet()
    folder, model = tool.folder / "checkpoints", functools.partial(_module(), optimizer)
    given, watch = callbacks(folder), watch or _watch()()
    with trace.during("save"):
        module, trainer = model(), _trainer(tool, [watch, *given], **(first or {"max_epochs": 2}))
        trainer.fit(module, _loader(6), _loader(4))
    trace.saved(module, *trainer.optimizers)
    _see(trace, "first", tool, trainer, given)
    path = resume(folder, given)
    with trace.during("load"):
        given = callbacks(folder)
        module, trainer = model(), _trainer(tool, [_watch()(), *given], **(then or {}))
        trainer.fit(module, _loader(6), _loader(4), ckpt_path=path)
    trace.resumed(module, *trainer.optimizers)
    _see(trace, "resumed", tool, trainer, given)


def _see(trace: Trace, when: str, tool: Tool, trainer: Any, callbacks: list[Any]) -> None:
    folder = tool.folder / "checkpoints"
    trace.see(f"{when}: files", names_in(folder) if folder.exists() else [])
    trace.see(f"{when}: progress", [trainer.current_epoch, trainer.global_step, trainer.should_stop])
    trace.see(f"{when}: metrics", {name: float(value) for name, value in trainer.callback_metrics.items()})
    trace.see(f"{when}: rates", [config.scheduler.get_last_lr() for config in trainer.lr_scheduler_configs])
    for number, callback in enumerate(callbacks):
        state = {key: _relative(value, tool.folder) for key, value in callback.state_dict().items()}
        trace.see(f"{when}: state of callback {number}", state)


def _relative(value: Any, folder: Path) -> Any:
    if isinstance(value, dict):
        return {_relative(key, folder): _relative(each, folder) for key, each in value.items()}
    return value.replace(str(folder), "") if isinstance(value, str) else value


def _saving(**options: Any) -> Callable[[Path], list[Any]]:
    def make(folder: Path) -> list[Any]:
        from lightning.pytorch.callbacks import ModelCheckpoint

        return [ModelCheckpoint(folder, **{"filename": "{epoch}-{step}", **options})]

    return make


def _named(name: str) -> Callable[[Path, list[Any]], str]:
    return lambda folder, callbacks: name if name == "last" else str(folder / name)


def _best(folder: Path, callbacks: list[Any]) -> str:
    return str(callbacks[0].best_model_path)


for _name, (_options, _from, _first) in {
    "epochs": ({"save_top_k": -1}, _named("epoch=1-step=6.ckpt"), {}),
    "the best two that fall": ({"monitor": "val", "save_top_k": 2}, _best, {}),
    "the best two that rise": ({"monitor": "val", "mode": "max", "save_top_k": 2}, _best, {}),
    "last": ({"save_last": True, "save_top_k": 1, "monitor": "val"}, _named("last.ckpt"), {}),
    "last by name": ({"save_last": True, "save_top_k": -1}, _named("last"), {}),
    "last as a link": ({"save_last": "link", "save_top_k": 1}, _named("last.ckpt"), {}),
    "after the validation": ({"save_on_train_epoch_end": False, "save_top_k": -1}, _named("epoch=1-step=6.ckpt"), {}),
    "after each of three validations": (
        {"save_on_train_epoch_end": False, "monitor": "val", "save_top_k": 3},
        _named("epoch=1-step=6.ckpt"),
        {"val_check_interval": 1},
    ),
    "every second epoch": ({"every_n_epochs": 2, "save_top_k": -1}, _named("epoch=1-step=6.ckpt"), {}),
    "the last step of an epoch": ({"every_n_train_steps": 3, "save_top_k": -1}, _named("epoch=0-step=3.ckpt"), {}),
    "accumulated": ({"save_top_k": -1}, _named("epoch=1-step=4.ckpt"), {"accumulate_grad_batches": 2}),
    "clipped": ({"save_top_k": -1}, _named("epoch=1-step=6.ckpt"), {"gradient_clip_val": 0.1}),
    "no validation": ({"save_top_k": -1}, _named("epoch=1-step=6.ckpt"), {"limit_val_batches": 0}),
    "sanity check": ({"save_top_k": -1}, _named("epoch=1-step=6.ckpt"), {"num_sanity_val_steps": 1}),
}.items():
    _add(
        f"lightning: {_name}",
        _fit,
        NEXT_EPOCH_BEGUN if _name in ("the last step of an epoch", "sanity check") else {},
        callbacks=_saving(**_options),
        resume=_from,
        first={"max_epochs": 2, **_first},
        then=_first,
    )


def _save_here(trainer: Any) -> None:
    trainer.save_checkpoint(Path(trainer.default_root_dir, "checkpoints", "here.ckpt"))


def _in_hook(tool: Tool, trace: Trace, hook: str) -> None:
    _fit(
        tool,
        trace,
        lambda folder: [],
        _named("here.ckpt"),
        watch=_watch()(_save_here, hook, at=2 if "epoch" in hook or "batch" in hook or "optim" in hook else 1),
        first={"max_epochs": 3, "enable_checkpointing": False},
        then={"enable_checkpointing": False},
    )


for _name in LIGHTNING_HOOKS:
    if _name not in ("setup", "teardown", "on_sanity_check_start", "on_sanity_check_end"):
        _differs = NO_EPOCH_SKIPPED if _name == "on_train_epoch_start" else {}
        _add(f"lightning: saved in {_name}", _in_hook, _differs, hook=_name)


_add(
    "lightning: an optimizer with a layout of its own",
    _fit,
    {},
    callbacks=_saving(save_top_k=-1),
    resume=_named("epoch=1-step=6.ckpt"),
    optimizer="hybrid",
)


# Accelerate


class _Counter:
    """What a script registers besides."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        note("counter state_dict", self.count)
        return {"count": self.count, "seen": [self.count] * 2}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        note("counter load_state_dict", state)
        self.count = state["count"]


class _Script:
    """The variables of a script as Accelerate's documentation writes it."""

    def __init__(
        self,
        tool: Tool,
        seed: int = 0,
        project: Mapping[str, Any] | None = None,
        optimizer: Callable[[nn.Module], Any] = _adam,
    ) -> None:
        from accelerate import Accelerator
        from accelerate.utils import ProjectConfiguration

        forget_process()
        options = {"automatic_checkpoint_naming": True, **(project or {})}
        configuration = ProjectConfiguration(str(tool.folder / "project"), **options)
        self.accelerator = Accelerator(cpu=True, project_config=configuration, gradient_accumulation_steps=2)
        if isinstance(tool, Ours):
            from dcp_plugin.accelerate import attach

            attach(self.accelerator)
        model = _Net(seed)
        made = optimizer(model)
        schedule = torch.optim.lr_scheduler.StepLR(made, 2, gamma=0.5)
        values = torch.arange(24.0).view(-1, 3) / 10
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(values), batch_size=2)
        prepared = self.accelerator.prepare(model, made, loader, schedule)
        self.model, self.optimizer, self.loader, self.schedule = prepared
        self.counter = _Counter()
        self.accelerator.register_for_checkpointing(self.counter)

    def train(self, trace: Trace, name: str, loader: Any = None, epochs: int = 1) -> None:
        losses = []
        for _ in range(epochs):
            for (batch,) in loader or self.loader:
                with self.accelerator.accumulate(self.model):
                    loss = self.model(batch).square().mean()
                    self.accelerator.backward(loss)
                    self.optimizer.step()
                    self.schedule.step()
                    self.optimizer.zero_grad()
                self.counter.count += 1
                losses.append(loss.item())
        trace.see(f"losses {name}", losses)
        trace.see(f"rates {name}", self.schedule.get_last_lr())

    def see(self, trace: Trace, when: str, tool: Tool) -> None:
        project = tool.folder / "project" / "checkpoints"
        trace.see(f"{when}: folders", names_in(project) if project.exists() else [])
        configuration = self.accelerator.project_configuration
        trace.see(f"{when}: iteration", configuration.iteration)
        trace.see(f"{when}: counter", self.counter.count)

    @property
    def objects(self) -> tuple[Any, Any]:
        return self.model, self.optimizer.optimizer


def _accelerate(
    tool: Tool,
    trace: Trace,
    save: Callable[[_Script, Path], Any],
    load: Callable[[_Script, Path], Any],
    skip: int = 0,
    **start: Any,
) -> None:
    quiet()
    script = _Script(tool, **start)
    script.train(trace, "before", epochs=2)
    trace.before(*script.objects)
    with trace.during("save"):
        save(script, tool.folder)
    trace.saved(*script.objects)
    script.see(trace, "saved", tool)
    script = _Script(tool, seed=1, **start)
    with trace.during("load"):
        load(script, tool.folder)
    trace.resumed(*script.objects)
    script.see(trace, "resumed", tool)
    loader = script.accelerator.skip_first_batches(script.loader, skip) if skip else None
    script.train(trace, "after", loader)


def _with_hooks(script: _Script, folder: Path) -> None:
    """As the scripts of diffusers do: a hook saves the models in its own way and takes them from the list."""

    def save(models: list[Any], weights: list[Any], output_dir: str) -> None:
        note("save hook", len(models), len(weights))
        while weights:
            weights.pop()
        torch.save(script.accelerator.unwrap_model(models[0]).state_dict(), Path(output_dir, "mine.pt"))

    script.accelerator.register_save_state_pre_hook(save)
    script.accelerator.save_state(str(folder / "hooked"))


def _with_load_hooks(script: _Script, folder: Path) -> None:
    def load(models: list[Any], input_dir: str) -> None:
        note("load hook", len(models))
        script.accelerator.unwrap_model(models.pop()).load_state_dict(torch.load(Path(input_dir, "mine.pt")))

    script.accelerator.register_load_state_pre_hook(load)
    script.accelerator.load_state(str(folder / "hooked"))


def _save(name: str | None = None, times: int = 1) -> Callable[[_Script, Path], None]:
    """Save to a folder of this name, or to the next one with an automatic name."""

    def save(script: _Script, folder: Path) -> None:
        for _ in range(times):
            script.accelerator.save_state(None if name is None else str(folder / name))

    return save


def _load(name: str | None = None) -> Callable[[_Script, Path], None]:
    return lambda script, folder: script.accelerator.load_state(None if name is None else str(folder / name))


_NAMED = {"automatic_checkpoint_naming": False}
for _name, (_write, _read, _more) in {
    "a folder": (_save("mine"), _load("mine"), {"project": _NAMED}),
    "automatic names": (_save(), _load(), {}),
    "a limit": (_save(times=3), _load(), {"project": {"total_limit": 2}}),
    "a number": (_save(times=3), _load("project/checkpoints/checkpoint_1"), {}),
    "an optimizer with a layout of its own": (_save(), _load(), {"optimizer": Hybrid}),
    "in the middle of an epoch": (_save(), _load(), {"skip": 2}),
    "hooks": (_with_hooks, _with_load_hooks, {"project": _NAMED}),
    "twice into one folder": (_save("mine", times=2), _load("mine"), {"project": _NAMED}),
    "not there": (lambda script, folder: None, _load("nowhere"), {"project": _NAMED}),
}.items():
    _differs = {} if _name == "not there" else RESUMED_BY_ACCELERATE
    _add(f"accelerate: {_name}", _accelerate, _differs, save=_write, load=_read, **_more)


# Fabric


def _fabric(
    tool: Tool,
    trace: Trace,
    state: Callable[[Any], dict[str, Any]],
    optimizer_of: Callable[[nn.Module], Any] = _adam,
    targets: bool = True,
    **load: Any,
) -> None:
    """Save what ``state`` makes of all that there is. ``load`` are options of the load.

    Args:
        targets: Whether the load is given live objects.
    """
    from lightning.fabric import Fabric

    quiet()

    def start(seed: int) -> tuple[Any, Any, Any]:
        fabric = Fabric(accelerator="cpu", devices=1)
        if isinstance(tool, Ours):
            from dcp_plugin.fabric import attach

            attach(fabric)
        net = _Net(seed)
        model, optimizer = fabric.setup(net, optimizer_of(net))
        return fabric, model, optimizer

    def train(fabric: Any, model: Any, optimizer: Any) -> list[float]:
        losses = []
        for batch in torch.arange(24.0).view(4, 2, 3) / 10:
            loss = model(batch).square().mean()
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    fabric, model, optimizer = start(0)
    train(fabric, model, optimizer)
    with trace.during("save"):
        fabric.save(tool.folder / "fabric.ckpt", state({"model": model, "optimizer": optimizer, "step": 4}))
    trace.saved(model.module, optimizer.optimizer)
    fabric, model, optimizer = start(1)
    wanted = {"model": model, "optimizer": optimizer, "step": 0}
    with trace.during("load"):
        rest = fabric.load(tool.folder / "fabric.ckpt", wanted if targets else None, **load)
    trace.resumed(model.module, optimizer.optimizer)
    trace.see("step", wanted["step"])
    trace.see("rest", sorted(rest))
    trace.see("losses", train(fabric, model, optimizer))


for _name, (_state, _options) in {
    "all": (lambda state: state, {}),
    "an optimizer with a layout of its own": (lambda state: state, {"optimizer_of": Hybrid}),
    "more is saved": (lambda state: {**state, "epoch": 3, "history": [1.5, 2.5]}, {}),
    "more is saved, not strict": (lambda state: {**state, "epoch": 3}, {"strict": False}),
    "less is saved": (lambda state: {"model": state["model"]}, {}),
    "less is saved, not strict": (lambda state: {"model": state["model"]}, {"strict": False}),
    "all of it as a dictionary": (lambda state: state, {"targets": False}),
}.items():
    _add(f"fabric: {_name}", _fabric, {}, state=_state, **_options)


# transformers


def _transformers(
    tool: Tool,
    trace: Trace,
    first: Mapping[str, Any],
    then: Mapping[str, Any] | None = None,
    optimizer: Callable[[nn.Module], Any] | None = None,
) -> None:
    """Train to the end of ``first``, then go on to the end of ``then`` with a new Trainer."""
    import transformers

    from dcp_plugin.transformers import DCPTrainerMixin

    quiet()
    transformers.utils.logging.set_verbosity_error()

    class Watch(transformers.TrainerCallback):  # type: ignore[misc]
        pass

    def hook(name: str) -> Any:
        def tell(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            note(name, state.global_step, sorted(kwargs), Path(state.best_model_checkpoint or "").name)

        return tell

    for name in _TRANSFORMERS_HOOKS:
        setattr(Watch, name, hook(name))

    base = transformers.Trainer
    ours = type("OursTrainer", (DCPTrainerMixin, base), {}) if isinstance(tool, Ours) else base

    class Mine(ours):  # type: ignore[valid-type, misc]
        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            note("evaluate", self.state.global_step)
            return super().evaluate(*args, **kwargs)

    values = torch.arange(36.0).view(-1, 3) / 10
    data = [{"x": row, "labels": row.sum()} for row in values]

    class Model(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.net = _Net(seed)

        def forward(self, x: Any, labels: Any = None) -> dict[str, Any]:
            out = self.net(x).squeeze(-1)
            return {"loss": (out - labels).square().mean(), "logits": out}

    def go(seed: int, options: Mapping[str, Any]) -> Any:
        forget_process()
        options = dict(options)
        resume = options.pop("resume", None)
        defaults = {"per_device_train_batch_size": 2, "num_train_epochs": 2, "save_steps": 3, "logging_steps": 2}
        arguments = transformers.TrainingArguments(
            str(tool.folder / "out"), report_to=[], use_cpu=True, seed=7, disable_tqdm=True, **{**defaults, **options}
        )
        model = Model(seed)
        given = {"optimizers": (optimizer(model), None)} if optimizer else {}
        trainer = Mine(model, arguments, train_dataset=data, eval_dataset=data[:4], callbacks=[Watch()], **given)
        trainer.remove_callback(transformers.PrinterCallback)
        if isinstance(resume, str):
            resume = str(tool.folder / "out" / resume)
        output = trainer.train(resume_from_checkpoint=resume)
        trace.see(f"{seed}: steps and loss", [output.global_step, output.training_loss])
        trace.see(f"{seed}: history", [_without_times(entry) for entry in trainer.state.log_history])
        kept = sorted(path.name for path in (tool.folder / "out").glob("checkpoint-*"))
        best = Path(trainer.state.best_model_checkpoint or "").name
        trace.see(f"{seed}: folders", [kept, best, trainer.state.best_metric, trainer.state.best_global_step])
        return trainer

    with trace.during("save"):
        trainer = go(0, first)
    trace.saved(trainer.model, trainer.optimizer.optimizer)
    with trace.during("load"):
        trainer = go(1, {**first, **(then or {"num_train_epochs": 3, "resume": True})})
    trace.resumed(trainer.model, trainer.optimizer.optimizer)


_TRANSFORMERS_HOOKS = (
    "on_init_end", "on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end", "on_step_begin",
    "on_pre_optimizer_step", "on_optimizer_step", "on_substep_end", "on_step_end", "on_evaluate", "on_save", "on_log",
)  # fmt: skip


def _without_times(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if "per_second" not in key and "runtime" not in key}


_BEST = {"load_best_model_at_end": True, "metric_for_best_model": "loss"}
for _name, _arguments in {
    "steps": {},
    "epochs": {"save_strategy": "epoch"},
    "a limit": {"save_total_limit": 2},
    "the best": {"eval_strategy": "steps", "eval_steps": 3, "save_total_limit": 2, **_BEST},
    "the best metric alone": {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "best", **_BEST},
    "evaluated by epoch, saved by step": {
        "eval_strategy": "epoch",
        "save_steps": 2,
        "save_total_limit": 2,
        "metric_for_best_model": "loss",
    },
    "accumulated": {"gradient_accumulation_steps": 2},
    "the model only": {"save_only_model": True, "then": {"num_train_epochs": 3}},
    "from a name": {"then": {"num_train_epochs": 3, "resume": "checkpoint-3"}},
    "data from its start": {"ignore_data_skip": True, "save_steps": 4},
}.items():
    _then = _arguments.pop("then", None)  # type: ignore[attr-defined]
    _add(f"transformers: {_name}", _transformers, {}, first=_arguments, then=_then)
_add("transformers: an optimizer with a layout of its own", _transformers, {}, first={}, optimizer=Hybrid)
