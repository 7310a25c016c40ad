"""What else a Trainer trains and resumes from: adapters, weights alone, checkpoints of stock and of others."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

import dcp_plugin as dcp
from tests import launch
from tests.compare import assert_same
from tests.launch import on_ranks
from tests.transformers_trainer import WORLD_SIZE


def _adapted(seed: int) -> Any:
    """The same base with other adapters."""
    import torch
    from peft import LoraConfig, get_peft_model

    from tests.transformers_trainer import training as t

    base = t.model()
    torch.manual_seed(seed)
    model = get_peft_model(base, LoraConfig(target_modules=["c_attn"], modules_to_save=["ln_f"], fan_in_fan_out=True))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    return model


def _train_adapters(root: Path, layout: str) -> Any:
    from tests.transformers_trainer import training as t

    trainer = t.trainer(root, layout, net=_adapted(1), callbacks=[watch := t.Watch()])
    trainer.train()
    return t.whole_state(trainer), watch.losses


def _resume_adapters(root: Path, layout: str) -> Any:
    from tests.transformers_trainer import training as t

    options = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 3, "eval_dataset": t.Text(4)}
    trainer = t.trainer(root, layout, net=_adapted(2), callbacks=[watch := t.Watch()], **options)
    trainer.train(resume_from_checkpoint=str(root / "checkpoint-3"))
    assert trainer.state.best_model_checkpoint == str(root / "checkpoint-6")
    return t.whole_state(trainer), watch.losses


def _adapters_for_inference(root: Path) -> None:
    """As PEFT's documentation does it, with a checkpoint of the Trainer."""
    from peft import PeftModel

    from tests.transformers_trainer import training as t

    model = PeftModel.from_pretrained(t.model(), str(root / "checkpoint-6"))
    adapters = {key: p.detach() for key, p in model.named_parameters() if "lora_" in key or "_to_save" in key}
    found = {f"model.{key}": value for key, value in adapters.items()}
    saved: dict[str, Any] = dict.fromkeys(found)
    dcp.load(saved, root / "checkpoint-6")
    assert_same(saved, found)


@pytest.mark.one_of
@pytest.mark.parametrize("layout", ["single", "fsdp2"])
def test_of_a_peft_model_the_adapters_are_saved(tmp_path: Path, layout: str) -> None:
    straight = launch.run(_train_adapters, WORLD_SIZE[layout], tmp_path, layout)[0]

    path = tmp_path / "checkpoint-3"
    keys = [tensor.key for tensor in dcp.inspect(path).tensors if tensor.key.startswith("model.")]
    assert keys and all("lora_" in key or "modules_to_save" in key for key in keys), keys
    assert not (path / "model.safetensors").exists()
    launch.run(_adapters_for_inference, 1, tmp_path)
    resumed = launch.run(_resume_adapters, WORLD_SIZE[layout], tmp_path, layout)[0]
    assert_same(straight[0], resumed[0])
    assert resumed[1].items() <= straight[1].items()


@pytest.mark.one_of
@pytest.mark.parametrize("layout", ["single", "ddp", "fsdp1", "fsdp2"])
@on_ranks(of=lambda layout: WORLD_SIZE[layout])
def test_the_trainer_alone_does_not_resume_adapters_without_their_optimizer(tmp_path: Path, layout: str) -> None:
    """It would begin with a new optimizer and schedule, and nothing would tell."""
    from torch.distributed.checkpoint.api import CheckpointException

    from tests.transformers_trainer import training as t

    t.trainer(tmp_path, layout, net=_adapted(1), max_steps=1, save_steps=1).train()
    missing = {"fsdp1": "Can't find a valid checkpoint", "fsdp2": r"optimizer_0/\.metadata"}
    with pytest.raises((OSError, ValueError, CheckpointException), match=missing.get(layout, r"optimizer\.pt")):
        t.trainer(tmp_path, layout, kind=t.OnCPU, net=_adapted(2)).train(resume_from_checkpoint=True)


@on_ranks(1)
def test_save_only_model_saves_and_resumes_only_the_model(tmp_path: Path) -> None:
    from tests.transformers_trainer import training as t

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
    from tests.transformers_trainer import training as t

    t.trainer(tmp_path, layout, kind=t.OnCPU, callbacks=[first := t.Watch()]).train()
    assert dcp.latest(tmp_path) == tmp_path / "checkpoint-6"
    results = []
    for kind in (t.OnCPU, t.Ours):
        trainer = t.trainer(tmp_path, layout, kind=kind, net=t.model(seed=9), callbacks=[watch := t.Watch()])
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
        results.append((t.whole_state(trainer), watch.losses))
    assert_same(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]
    assert results[1][1].items() <= first.losses.items()


@on_ranks(1)
def test_a_checkpoint_of_another_door_gives_model_and_optimizer(tmp_path: Path) -> None:
    from tests.transformers_trainer import training as t

    trained = t.trainer(tmp_path / "unused", save_strategy="no")
    trained.train()
    dcp.save({"model": trained.model, "optim": trained.optimizer.optimizer}, tmp_path / "elsewhere", step=6)
    with pytest.warns(UserWarning, match="model and optimizer are loaded exactly, but it has no trainer_state.json"):
        seen = t.begin(t.trainer(tmp_path, net=t.model(seed=9)), tmp_path / "elsewhere")
    assert seen.step == 0
    expected = {key: value for key, value in t.whole_state(trained).items() if not key.startswith("schedule.")}
    assert_same(expected, {key: value for key, value in seen.state.items() if not key.startswith("schedule.")})


def _loaded_by_core(path: Path) -> None:
    from tests.transformers_trainer import training as t

    model = t.model(seed=9)
    import torch

    report = dcp.load({"model": model, "optim": torch.optim.AdamW(model.parameters())}, path)
    assert not report.missing and not report.unexpected


@on_ranks(1)
def test_any_trainer_and_the_export_stays_stocks(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, Seq2SeqTrainer, Seq2SeqTrainingArguments

    from dcp_plugin.transformers import DCPTrainerMixin
    from tests.transformers_trainer import training as t

    class Mine(DCPTrainerMixin, Seq2SeqTrainer):
        checkpoint_config = dcp.CheckpointConfig(async_save=True)

    arguments = Seq2SeqTrainingArguments(
        str(tmp_path), max_steps=2, save_steps=2, use_cpu=True, report_to="none", disable_tqdm=True
    )
    trainer = Mine(t.model(), arguments, train_dataset=t.Text(16))
    trainer.train()
    _loaded_by_core(tmp_path / "checkpoint-2")
    trainer.save_model(str(tmp_path / "export"))
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert_same(exported.state_dict(), trainer.model.state_dict())


@on_ranks(1)
def test_keep_last_is_refused_since_it_does_not_know_the_best(tmp_path: Path) -> None:
    from tests.transformers_trainer import training as t

    with pytest.raises(ValueError, match="use save_total_limit"):
        t.trainer(tmp_path, config=dcp.CheckpointConfig(keep_last=2))


@on_ranks(1)
def test_ignore_data_skip_means_what_it_means_with_stock(tmp_path: Path) -> None:
    """With ``ignore_data_skip`` the epoch starts again; the random numbers go on."""
    from tests.transformers_trainer import training as t

    t.trainer(tmp_path, callbacks=[first := t.Watch()]).train()
    second = t.trainer(tmp_path, callbacks=[watch := t.Watch()], ignore_data_skip=True, net=t.model(seed=9))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert sorted(watch.losses) == [4, 5, 6]
    assert watch.losses[4] != first.losses[4]


def _masked(samples: list[dict[str, Any]]) -> dict[str, Any]:
    import torch

    batch = torch.stack([sample["input_ids"] for sample in samples])
    return {"input_ids": batch.where(torch.rand(batch.shape) > 0.2, 0), "labels": batch}


@on_ranks(1)
def test_random_batches_in_the_middle_of_an_epoch_are_said_not_to_be_exact(tmp_path: Path) -> None:
    from tests.transformers_trainer import training as t

    for save_steps, exact in ((3, False), (4, True)):
        folder = tmp_path / str(save_steps)
        t.trainer(folder, save_steps=save_steps, data_collator=_masked, callbacks=[first := t.Watch()]).train()
        resumed = t.trainer(folder, data_collator=_masked, callbacks=[watch := t.Watch()], save_strategy="no")
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{save_steps}"))
        assert (watch.losses.items() <= first.losses.items()) == exact
        assert any("draws others than without" in str(one.message) for one in said) == (not exact)


@on_ranks(1)
def test_a_training_that_begins_with_loaded_weights_has_no_random_numbers_to_continue(tmp_path: Path) -> None:
    from tests.transformers_trainer import training as t

    dcp.save({"model": t.model()}, tmp_path / "elsewhere")
    trainer = t.trainer(tmp_path, data_collator=_masked, save_strategy="no")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.train(resume_from_checkpoint=str(tmp_path / "elsewhere"))
    assert not any("draws others than without" in str(one.message) for one in said)


@on_ranks(2)
def test_fsdp_that_became_ddp_is_an_error(tmp_path: Path) -> None:
    from tests.transformers_trainer import training as t

    with pytest.raises(dcp.CheckpointError, match=r"ask for FSDP, but Accelerate trains with .*MULTI_CPU"):
        t.trainer(tmp_path, "ddp", fsdp=True)


@on_ranks(1)
def test_a_mixin_behind_the_trainer_is_an_error(tmp_path: Path) -> None:
    from transformers import Trainer

    from dcp_plugin.transformers import DCPTrainerMixin

    with pytest.raises(TypeError, match=r"put DCPTrainerMixin before the Trainer: class Mine\(DCPTrainerMixin"):
        type("Mine", (Trainer, DCPTrainerMixin), {})
