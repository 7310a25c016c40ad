"""What the integration relies on inside of transformers and PEFT. If one of these fails, they have changed: see
``_transformers.py``, and the order of events at the top of ``mixin.py``."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from tests.launch import on_ranks

OVERRIDDEN = {
    "train": ("resume_from_checkpoint", "trial", "ignore_keys_for_eval"),
    "save_model": ("output_dir", "_internal_call"),
    "_get_output_dir": ("trial",),
    "_save_checkpoint": ("model", "trial"),
    "_save_optimizer_and_scheduler": ("output_dir",),
    "_save_scaler": ("output_dir",),
    "_save_rng_state": ("output_dir",),
    "_push_from_checkpoint": ("checkpoint_folder",),
    "_prepare_for_training": ("max_steps", "train_dataloader", "resume_from_checkpoint"),
    "_load_from_checkpoint": ("resume_from_checkpoint", "model"),
    "_load_optimizer_and_scheduler": ("checkpoint",),
    "_load_scaler": ("checkpoint",),
    "_load_rng_state": ("checkpoint",),
    "get_batch_samples": ("epoch_iterator", "num_batches", "device"),
    "_load_best_model": (),
    "_finalize_training": ("trial", "num_train_samples", "start_time"),
}
"""Methods of Trainer that the mixin overrides, with their parameters."""


@on_ranks(1)
def test_names_that_the_mixin_uses() -> None:
    from transformers import Trainer

    from dcp_plugin.transformers import DCPTrainerMixin

    for name, parameters in OVERRIDDEN.items():
        method = getattr(Trainer, name, None)
        assert method is not None, f"Trainer.{name} is gone: what DCPTrainerMixin does there has to move"
        found = tuple(inspect.signature(method).parameters)[1:]
        assert found == parameters, f"Trainer.{name} takes {found} and not {parameters} any more"
    ours = {name for name, value in vars(DCPTrainerMixin).items() if inspect.isfunction(value)}
    taken_over = {name for name in ours if not name.startswith(("_dcp_", "__"))}
    assert taken_over == set(OVERRIDDEN), "OVERRIDDEN lists what the mixin overrides"


@on_ranks(1)
def test_an_older_trainer_is_refused(tmp_path: Path) -> None:
    """Before transformers 5.3, no method of the mixin is called between the setup of a training and its first step."""
    from transformers import Trainer

    import dcp_plugin as dcp
    from tests.transformers.trainer import training as t

    prepare = Trainer._prepare_for_training
    del Trainer._prepare_for_training
    try:
        with pytest.raises(dcp.CheckpointError, match=r"needs transformers 5\.3 or newer"):
            t.trainer(tmp_path)
    finally:
        Trainer._prepare_for_training = prepare


@on_ranks(1)
def test_the_order_in_which_a_training_saves_and_resumes(tmp_path: Path) -> None:
    """The order in which a training saves, and resumes."""
    from tests.transformers.trainer import training as t

    order: list[str] = []

    class Watched(t.OnCPU):  # type: ignore[misc, name-defined]
        pass

    def watch(name: str) -> None:
        real = getattr(t.OnCPU, name)

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            order.append(name)
            return real(self, *args, **kwargs)

        setattr(Watched, name, method)

    for name in (
        "save_model", "_save_checkpoint", "_save_optimizer_and_scheduler", "_save_scaler", "_save_rng_state",
        "_prepare_for_training", "_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_rng_state",
        "get_batch_samples", "training_step", "_finalize_training",
    ):  # fmt: skip
        watch(name)
    t.trainer(tmp_path, kind=Watched, max_steps=1, save_steps=1).train()
    save = order[order.index("_save_checkpoint") :]
    assert save == [
        "_save_checkpoint", "save_model", "_save_optimizer_and_scheduler", "_save_scaler", "_save_rng_state",
        "_finalize_training",
    ], "a checkpoint is saved in other steps: _save_checkpoint of the mixin is built on these"  # fmt: skip
    order.clear()
    t.trainer(tmp_path, kind=Watched, max_steps=2, save_strategy="no").train(resume_from_checkpoint=True)
    resume = order[: order.index("training_step") + 1]
    assert resume == [
        "_load_from_checkpoint", "_prepare_for_training", "_load_optimizer_and_scheduler", "get_batch_samples",
        "_load_rng_state", "training_step",
    ], "a training resumes in other steps: random streams must be set after the batches that are skipped"  # fmt: skip


@on_ranks(1)
def test_all_that_the_trainer_writes_goes_where_get_output_dir_says(tmp_path: Path) -> None:
    """All that the Trainer writes goes where _get_output_dir says, and it pushes and rotates only there."""
    from tests.transformers.trainer import training as t

    class Elsewhere(t.OnCPU):  # type: ignore[misc, name-defined]
        def _get_output_dir(self, trial: Any) -> str:
            return str(tmp_path / "elsewhere")

    t.trainer(tmp_path / "out", kind=Elsewhere, save_total_limit=1).train()
    assert [path.name for path in tmp_path.joinpath("elsewhere").iterdir()] == ["checkpoint-6"]
    assert not list(tmp_path.joinpath("out").iterdir()), "the Trainer writes to args.output_dir, too"


@on_ranks(1)
def test_peft_hands_out_the_tensors_that_it_is_given() -> None:
    """PEFT hands out the very tensors that it is given, so that adapters are known by identity."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    from tests.transformers.trainer import training as t

    model = get_peft_model(t.model(), LoraConfig(target_modules=["c_attn"], modules_to_save=["ln_f"]))
    given = dict(model.state_dict())
    kept = get_peft_model_state_dict(model, dict(given), save_embedding_layers=False)
    names = {name for name, value in given.items() if any(value is other for other in kept.values())}
    assert names == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
