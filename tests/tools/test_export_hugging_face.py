"""``export --format hf``: what ``from_pretrained`` makes of the folder computes what was saved."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dcp_plugin as dcp
from dcp_plugin.core.media.disk.local_files import LocalFiles
from tests import launch
from tests.places import names_in

KINDS = ("gpt2", "tied", "untied", "lora")
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
TOKENS = torch.arange(12).reshape(2, 6)


def _made(kind: str) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if kind == "gpt2":
        return GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=32))
    model = LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=kind == "tied"))
    if kind != "lora":
        return model
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    config.init_lora_weights = False
    model = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:
                parameter.add_(0.1)
    return model


def _logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(TOKENS).logits
    return found


def _describe(model: Any, folder: Path) -> None:
    """The configuration, without the weights."""
    inner = model.base_model.model if hasattr(model, "peft_config") else model
    inner.config.save_pretrained(folder)
    if inner is not model:
        model.peft_config["default"].save_pretrained(folder)


def _check(root: Path, name: str, logits: torch.Tensor) -> None:
    from transformers import AutoModelForCausalLM

    report = dcp.export(root / name, root / f"{name}-hf", "hf", config=root / "config", max_shard_size="20KB")
    assert len(report.files) > 2, report
    made = AutoModelForCausalLM.from_pretrained(root / f"{name}-hf")
    assert torch.equal(_logits(made), logits), name


def test_a_link_out_of_the_checkpoint_is_not_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalFiles, "leads_elsewhere", lambda files, name: False)  # it becomes a link after a check
    dcp.save({"model": nn.Linear(2, 2)}, tmp_path / "ck")
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "ck" / "tokenizer.json").symlink_to(tmp_path / "secret")
    (tmp_path / "ck" / "vocab.txt").write_text("a")
    report = dcp.export(tmp_path / "ck", tmp_path / "hf", "hf")
    assert names_in(tmp_path / "hf") == ["model.safetensors", "vocab.txt"]
    assert report.notes[0] == "tokenizer.json was left out: it is a link that leads out of the checkpoint."


def test_tied_weights_go_out_once_and_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = _made("tied")
    _describe(model, tmp_path / "config")
    dcp.save({"app": {"net": model}, "optim": torch.optim.AdamW(model.parameters())}, tmp_path / "ck")
    _check(tmp_path, "ck", _logits(model))
    half = dcp.export(tmp_path / "ck", tmp_path / "half", "hf", config=tmp_path / "config", dtype="bfloat16")
    assert half.nbytes * 2 == sum(parameter.nbytes for parameter in model.parameters())
    with pytest.raises(dcp.CheckpointMismatch, match="does not have"):
        dcp.export(tmp_path / "ck", tmp_path / "no", "hf", config=tmp_path / "config", exclude="*.0.mlp.*")
    assert not (tmp_path / "no").exists()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT reads it
@pytest.mark.parametrize("with_config", [True, False])
def test_adapters_alone_are_exported_for_the_base_that_they_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_config: bool
) -> None:
    """As in a checkpoint of the Trainer; with the base's folder as ``config=`` the export was refused."""
    from transformers import AutoModelForCausalLM

    from dcp_plugin.transformers._transformers import adapters_of

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = _made("lora")
    logits = _logits(model)
    dcp.save({"model": adapters_of(model, model)}, tmp_path / "ck")
    model.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    model.peft_config["default"].save_pretrained(tmp_path / "ck")
    model.unload().save_pretrained(tmp_path / "base")
    report = dcp.export(tmp_path / "ck", tmp_path / "out", "hf", config=tmp_path / "base" if with_config else None)
    assert report.notes == [
        f"The base model is not in it: from_pretrained takes the one that adapter_config.json names, '{tmp_path}/base'."
    ]
    assert torch.equal(_logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT reads it
@pytest.mark.parametrize("is_known", [True, False])
def test_the_base_of_adapters_is_exported_where_its_configuration_is_known(tmp_path: Path, is_known: bool) -> None:
    model = _made("lora")
    dcp.save({"model": model}, tmp_path / "ck")
    model.base_model.model.config.save_pretrained(tmp_path / "base")
    model.peft_config["default"].base_model_name_or_path = str(tmp_path / "base") if is_known else "meta/Llama"
    model.peft_config["default"].save_pretrained(tmp_path / "config")
    report = dcp.export(tmp_path / "ck", tmp_path / "out", "hf", config=tmp_path / "config")
    assert ("model.safetensors" in report.files) == is_known
    assert is_known or "The base model is left out: it needs its config.json in config=" in report.notes[0]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT reads it
def test_a_trained_parameter_that_the_file_of_an_adapter_does_not_have_is_an_error(tmp_path: Path) -> None:
    """PEFT itself loses it."""
    from safetensors.torch import load_file

    model = _made("lora")
    key = "base_model.model.model.norm.weight"
    model.get_parameter(key).requires_grad_(True)
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad])
    model(TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()
    dcp.save({"model": model, "optim": optimizer}, tmp_path / "ck")
    model.peft_config["default"].save_pretrained(tmp_path / "config")
    with pytest.raises(dcp.CheckpointMismatch, match=rf"model\.{key} would be lost"):
        dcp.export(tmp_path / "ck", tmp_path / "out", "hf", config=tmp_path / "config")
    model.base_model.model.config.save_pretrained(tmp_path / "config")
    dcp.export(tmp_path / "ck", tmp_path / "out", "hf", config=tmp_path / "config")
    assert torch.equal(load_file(tmp_path / "out/model.safetensors")["model.norm.weight"], model.get_parameter(key))


def _save(root: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    os.environ["HF_HUB_OFFLINE"] = "1"
    for kind in KINDS:
        model = _made(kind)
        logits = _logits(model)
        if torch.distributed.get_rank() == 0:
            (root / kind).mkdir()
            _describe(model, root / kind / "config")
            torch.save(logits, root / kind / "logits.pt")
        torch.distributed.barrier()
        for block in model.modules():
            if type(block).__name__ in ("GPT2Block", "LlamaDecoderLayer"):
                fully_shard(block)
        fully_shard(model)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        dcp.save({"model": model, "optim": torch.optim.AdamW(trained)}, root / kind / "ck")


@pytest.mark.long
def test_models_that_were_sharded_compute_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    launch.run(_save, 2, tmp_path)
    for kind in KINDS:
        _check(tmp_path / kind, "ck", torch.load(tmp_path / kind / "logits.pt"))


def test_modules_with_names_that_peft_uses_are_no_adapters(tmp_path: Path) -> None:
    prompts = nn.ModuleDict({"mask": nn.Linear(2, 2)})
    net = nn.ModuleDict({"base_model": nn.ModuleDict({"model": nn.Linear(2, 2)}), "prompt_encoder": prompts})
    dcp.save({"model": net}, tmp_path / "ck")
    assert dcp.export(tmp_path / "ck", tmp_path / "out", "hf").files == ["model.safetensors"]
