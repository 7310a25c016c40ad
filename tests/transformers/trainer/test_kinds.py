"""What else a Trainer trains and resumes from: adapters, weights alone, checkpoints of stock and of others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import dcp_plugin as dcp
from tests.compare import assert_same
from tests.launch import on_ranks
from tests.messages import warned
from tests.transformers.trainer import WORLD_SIZE


def _adapted(seed: int) -> Any:
    """The same base with other adapters."""
    import torch
    from peft import LoraConfig, get_peft_model

    from tests.transformers.trainer import training as t

    base = t.model()
    torch.manual_seed(seed)
    model = get_peft_model(base, LoraConfig(target_modules=["c_attn"], modules_to_save=["ln_f"], fan_in_fan_out=True))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    return model


@pytest.mark.one_of
@pytest.mark.parametrize("layout", ["single", "fsdp2"])
@on_ranks(of=lambda layout: WORLD_SIZE[layout])
def test_of_a_peft_model_the_adapters_are_saved(tmp_path: Path, layout: str) -> None:
    from peft import PeftModel

    from tests.transformers.trainer import training as t

    straight = t.run(t.trainer(tmp_path, layout, net=_adapted(1)))
    path = tmp_path / "checkpoint-3"
    keys = [tensor.key for tensor in dcp.inspect(path).tensors if tensor.key.startswith("model.")]
    assert keys and all("lora_" in key or "modules_to_save" in key for key in keys), keys
    assert not (path / "model.safetensors").exists()

    # As PEFT's documentation does it, with a checkpoint of the Trainer.
    model = PeftModel.from_pretrained(t.model(), str(tmp_path / "checkpoint-6"))
    adapters = {key: p.detach() for key, p in model.named_parameters() if "lora_" in key or "_to_save" in key}
    found = {f"model.{key}": value for key, value in adapters.items()}
    saved: dict[str, Any] = dict.fromkeys(found)
    dcp.load(saved, tmp_path / "checkpoint-6")
    assert_same(saved, found)

    options = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 3, "eval_dataset": t.Text(4)}
    trainer = t.trainer(tmp_path, layout, net=_adapted(2), **options)
    resumed = t.run(trainer, path)
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-6")
    assert_same(straight.state, resumed.state)
    assert resumed.losses.items() <= straight.losses.items()


@pytest.mark.one_of
@pytest.mark.parametrize("layout", ["single", "ddp", "fsdp1", "fsdp2"])
@on_ranks(of=lambda layout: WORLD_SIZE[layout])
def test_the_trainer_alone_does_not_resume_adapters_without_their_optimizer(tmp_path: Path, layout: str) -> None:
    """It would begin with a new optimizer and schedule, and nothing would tell."""
    from torch.distributed.checkpoint.api import CheckpointException

    from tests.transformers.trainer import training as t

    t.trainer(tmp_path, layout, net=_adapted(1), max_steps=1, save_steps=1).train()
    missing = {"fsdp1": "Can't find a valid checkpoint", "fsdp2": r"optimizer_0/\.metadata"}
    with pytest.raises((OSError, ValueError, CheckpointException), match=missing.get(layout, r"optimizer\.pt")):
        t.trainer(tmp_path, layout, kind=t.OnCPU, net=_adapted(2)).train(resume_from_checkpoint=True)


@on_ranks(1)
def test_save_only_model_saves_and_resumes_only_the_model(tmp_path: Path) -> None:
    from tests.transformers.trainer import training as t

    trainer = t.trainer(tmp_path, save_only_model=True)
    trainer.train()
    path = tmp_path / "checkpoint-6"
    assert {tensor.key.partition(".")[0] for tensor in dcp.inspect(path).tensors} == {"model"}
    with pytest.warns(UserWarning, match="the model is loaded exactly, but .* no schedule.* no optimizer"):
        seen = t.begin(t.trainer(tmp_path, net=t.model(seed=9)), resume=True)
    assert seen.step == 6
    model = {key: value for key, value in t.whole_state(trainer).items() if key.startswith("model.")}
    assert_same(model, {key: value for key, value in seen.state.items() if key.startswith("model.")})


@pytest.mark.one_of
@pytest.mark.parametrize("layout", ["single", "fsdp2"])
@on_ranks(of=lambda layout: WORLD_SIZE[layout])
def test_a_checkpoint_of_stock_resumes_as_with_stock(tmp_path: Path, layout: str) -> None:
    from tests.transformers.trainer import training as t

    first = t.run(t.trainer(tmp_path, layout, kind=t.OnCPU))
    assert dcp.latest(tmp_path) == tmp_path / "checkpoint-6"
    stock, ours = (
        t.run(t.trainer(tmp_path, layout, kind=kind, net=t.model(seed=9)), tmp_path / "checkpoint-3")
        for kind in (t.OnCPU, t.Ours)
    )
    assert_same(stock.state, ours.state)
    assert stock.losses == ours.losses
    assert ours.losses.items() <= first.losses.items()


@on_ranks(1)
def test_a_checkpoint_of_another_door_gives_model_and_optimizer(tmp_path: Path) -> None:
    from tests.transformers.trainer import training as t

    trained = t.trainer(tmp_path / "unused", save_strategy="no")
    trained.train()
    dcp.save({"model": trained.model, "optim": trained.optimizer.optimizer}, tmp_path / "elsewhere", step=6)
    with pytest.warns(UserWarning, match="model and optimizer are loaded exactly, but it has no trainer_state.json"):
        seen = t.begin(t.trainer(tmp_path, net=t.model(seed=9)), tmp_path / "elsewhere")
    assert seen.step == 0
    expected = {key: value for key, value in t.whole_state(trained).items() if not key.startswith("schedule.")}
    assert_same(expected, {key: value for key, value in seen.state.items() if not key.startswith("schedule.")})


@on_ranks(1)
def test_any_trainer_and_the_export_stays_stocks(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, Seq2SeqTrainer, Seq2SeqTrainingArguments

    from dcp_plugin.transformers import DCPTrainerMixin
    from tests.transformers.trainer import training as t

    class Mine(DCPTrainerMixin, Seq2SeqTrainer):
        checkpoint_config = dcp.CheckpointConfig(async_save=True)

    arguments = Seq2SeqTrainingArguments(
        str(tmp_path), max_steps=2, save_steps=2, use_cpu=True, report_to="none", disable_tqdm=True
    )
    trainer = Mine(t.model(), arguments, train_dataset=t.Text(16))
    trainer.train()
    model = t.model(seed=9)
    report = dcp.load({"model": model, "optim": torch.optim.AdamW(model.parameters())}, tmp_path / "checkpoint-2")
    assert not report.missing and not report.unexpected
    trainer.save_model(str(tmp_path / "export"))
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert_same(exported.state_dict(), trainer.model.state_dict())


@on_ranks(1)
def test_keep_last_is_refused_since_it_does_not_know_the_best(tmp_path: Path) -> None:
    from tests.transformers.trainer import training as t

    with pytest.raises(ValueError, match="use save_total_limit"):
        t.trainer(tmp_path, config=dcp.CheckpointConfig(keep_last=2))


@on_ranks(1)
def test_ignore_data_skip_means_what_it_means_with_stock(tmp_path: Path) -> None:
    """With ``ignore_data_skip`` the epoch starts again; the random numbers go on."""
    from tests.transformers.trainer import training as t

    first = t.run(t.trainer(tmp_path))
    second = t.trainer(tmp_path, ignore_data_skip=True, net=t.model(seed=9))
    resumed = t.run(second, tmp_path / "checkpoint-3")
    assert sorted(resumed.losses) == [4, 5, 6]
    assert resumed.losses[4] != first.losses[4]


def _masked(samples: list[dict[str, Any]]) -> dict[str, Any]:
    import torch

    batch = torch.stack([sample["input_ids"] for sample in samples])
    return {"input_ids": batch.where(torch.rand(batch.shape) > 0.2, 0), "labels": batch}


@on_ranks(1)
def test_random_batches_in_the_middle_of_an_epoch_are_said_not_to_be_exact(tmp_path: Path) -> None:
    from tests.transformers.trainer import training as t

    for save_steps, exact in ((3, False), (4, True)):
        folder = tmp_path / str(save_steps)
        first = t.run(t.trainer(folder, save_steps=save_steps, data_collator=_masked))
        resumed = t.trainer(folder, data_collator=_masked, save_strategy="no")
        with warned("draws others than without") as said:
            ran = t.run(resumed, folder / f"checkpoint-{save_steps}")
        assert (ran.losses.items() <= first.losses.items()) == exact
        assert bool(said) == (not exact)


@on_ranks(1)
def test_a_training_that_begins_with_loaded_weights_has_no_random_numbers_to_continue(tmp_path: Path) -> None:
    from tests.transformers.trainer import training as t

    dcp.save({"model": t.model()}, tmp_path / "elsewhere")
    trainer = t.trainer(tmp_path, data_collator=_masked, save_strategy="no")
    with warned("draws others than without") as said:
        trainer.train(resume_from_checkpoint=str(tmp_path / "elsewhere"))
    assert not said


@on_ranks(2)
def test_fsdp_that_became_ddp_is_an_error(tmp_path: Path) -> None:
    from tests.transformers.trainer import training as t

    with pytest.raises(dcp.CheckpointError, match=r"ask for FSDP, but Accelerate trains with .*MULTI_CPU"):
        t.trainer(tmp_path, "ddp", fsdp=True)


@on_ranks(1)
def test_a_mixin_behind_the_trainer_is_an_error(tmp_path: Path) -> None:
    from transformers import Trainer

    from dcp_plugin.transformers import DCPTrainerMixin

    with pytest.raises(TypeError, match=r"put DCPTrainerMixin before the Trainer: class Mine\(DCPTrainerMixin"):
        type("Mine", (Trainer, DCPTrainerMixin), {})
