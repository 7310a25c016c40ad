"""Where a model is in a checkpoint, what it is made of, and what is said where that cannot be known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import dcp_plugin as dcp
from tests.compare import assert_same
from tests.launch import on_ranks
from tests.object_server import Bucket
from tests.training import QUIET


@pytest.mark.long
@on_ranks(1)
def test_the_prefix_is_found_in_what_any_door_writes(tmp_path: Path) -> None:
    import torch
    import torch.distributed.checkpoint as stock
    from accelerate import Accelerator
    from safetensors.torch import save_file

    from dcp_plugin import accelerate
    from tests.transformers.pretrained import models as m

    net = m.model("llama-tied")
    optimizer = m.stepped(net)
    expected = m.seen(net)
    lightning_module = torch.nn.Module()
    lightning_module.net = torch.nn.ModuleDict({"lm": net})
    dcp.save({"model": net, "optim": optimizer, "extra": {"lr": 0.1}}, tmp_path / "plain")
    dcp.save({"model": lightning_module, "optim": optimizer}, tmp_path / "lightning")
    stock.save({"app": {"state": net.state_dict(), "epoch": 3}}, checkpoint_id=tmp_path / "stock")
    stock.save(net.state_dict(), checkpoint_id=tmp_path / "bare")
    torch.save({"model": {f"module.{key}": value for key, value in net.state_dict().items()}}, tmp_path / "file.pt")
    save_file({"lm." + key: value.clone() for key, value in net.state_dict().items()}, tmp_path / "file.safetensors")
    accelerator = Accelerator(cpu=True)
    accelerate.attach(accelerator)
    accelerator.prepare(net)
    accelerator.save_state(tmp_path / "accelerate")
    for name in ("plain", "lightning", "stock", "bare", "file.pt", "file.safetensors", "accelerate"):
        loaded, report = m.from_pretrained(
            m.AutoModelForCausalLM, tmp_path / name, config=m.config("llama-tied"), output_loading_info=True
        )
        assert_same(expected, m.seen(loaded))
        assert report.missing == report.unexpected == []
        assert not loaded.training and loaded.lm_head.weight is loaded.model.embed_tokens.weight


@pytest.mark.long
@on_ranks(1)
def test_a_checkpoint_of_lightning(tmp_path: Path) -> None:
    import lightning.pytorch as pl
    import torch

    from dcp_plugin.lightning import DCPCheckpointIO
    from tests.transformers.pretrained import models as m

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.language_model = m.model("llama-tied")

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.language_model(input_ids=batch, labels=batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    module = Module()
    trainer = pl.Trainer(plugins=[DCPCheckpointIO()], max_steps=1, enable_checkpointing=False, **QUIET)
    trainer.fit(module, torch.utils.data.DataLoader(m.ids(), batch_size=2))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    loaded = m.from_pretrained(m.AutoModelForCausalLM, tmp_path / "last.ckpt", config=m.config("llama-tied"))
    assert_same(m.seen(module.language_model), m.seen(loaded))


@on_ranks(1)
def test_what_is_not_there_is_said_before_anything_else(tmp_path: Path) -> None:
    from tests.transformers.pretrained import models as m

    with pytest.raises(dcp.CheckpointNotFound):
        m.from_pretrained(m.AutoModelForCausalLM, tmp_path / "nothing")


@on_ranks(1)
def test_a_checkpoint_of_the_trainer_has_the_configuration(tmp_path: Path) -> None:
    import torch

    from tests.transformers.pretrained import models as m
    from tests.transformers.trainer import training as t

    net = m.model("gpt2")
    net.generation_config.max_new_tokens = 3
    t.trainer(tmp_path, net=net, max_steps=1, save_steps=1).train()
    path = tmp_path / "checkpoint-1"
    loaded = m.from_pretrained(m.AutoModelForCausalLM, path)
    assert_same(m.seen(net.eval()), m.seen(loaded))
    assert type(loaded) is type(net) and loaded.generation_config.max_new_tokens == 3
    assert loaded.config.name_or_path == str(path) and loaded.dtype is torch.float32
    half = m.from_pretrained(type(net), path, dtype="bfloat16", attn_implementation="eager")
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    assert half.config._attn_implementation == "eager" and half.config.dtype is torch.bfloat16
    assert torch.equal(half.lm_head.weight, net.lm_head.weight.bfloat16())


@on_ranks(1)
def test_the_dtype_is_that_of_the_checkpoint_where_the_configuration_has_none(tmp_path: Path) -> None:
    import torch

    from tests.transformers.pretrained import models as m

    dcp.save({"model": m.model("llama").to(torch.bfloat16)}, tmp_path / "half")
    loaded = m.from_pretrained(m.AutoModelForCausalLM, tmp_path / "half", config=m.config("llama"))
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in loaded.buffers()} == {torch.float32}
    whole = m.from_pretrained(m.AutoModelForCausalLM, tmp_path / "half", config=m.config("llama"), dtype=None)
    assert whole.dtype is torch.float32


@on_ranks(1)
def test_what_does_not_fit_is_an_error_that_names_the_way_out(tmp_path: Path) -> None:
    import torch

    from tests.transformers.pretrained import models as m

    def load(name: str, kind: str = "llama", **options: Any) -> Any:
        given = {"config": m.config(kind), **options}
        return m.from_pretrained(options.pop("cls", m.AutoModelForCausalLM), tmp_path / name, **given)

    net = m.model("llama")
    dcp.save({"model": net, "ema": m.model("llama", seed=1)}, tmp_path / "two")
    dcp.save({"model": {k: v for k, v in net.state_dict().items() if k != "lm_head.weight"}}, tmp_path / "less")
    dcp.save({"model": {**net.state_dict(), "model.more": torch.zeros(2)}}, tmp_path / "more")
    said = {
        r"several models .* Choose one: prefix='ema\.', prefix='model\.'": lambda: load("two"),
        r"no key of LlamaForCausalLM behind prefix='net'": lambda: load("two", prefix="net"),
        r"1 of its 21 keys are not in the checkpoint: lm_head\.weight. strict=False initialises": lambda: load("less"),
        r"1 keys are only in the checkpoint: model\.model\.more": lambda: load("more"),
        r"embed_tokens.weight has shape \(32, 24\), and \(32, 16\) in the checkpoint": lambda: load(
            "less", config=m.config("llama", width=24)
        ),
        r"no key of GPT2LMHeadModel": lambda: load("less", "gpt2"),
        r"has no config\.json.*config=": lambda: load("less", config=None),
    }
    for pattern, attempt in said.items():
        with pytest.raises(dcp.CheckpointMismatch, match=pattern):
            attempt()
    for pattern, options in {
        "device_map: device=": {"device_map": "auto"},
        "give either distributed_config or parallelize": {"parallelize": m.shard, "distributed_config": {}},
        "dtype='float33' is no dtype": {"dtype": "float33"},
    }.items():
        with pytest.raises(ValueError, match=pattern):
            load("more", **options)
    assert_same(m.seen(net), m.seen(load("two", prefix="model")))
    with pytest.warns(UserWarning, match="only in the checkpoint"):
        assert_same(m.seen(net), m.seen(load("more", strict=False)))
    with pytest.warns(UserWarning, match=r"not in the checkpoint: lm_head\.weight. Missing keys are initialised"):
        loaded = load("less", strict=False)
    assert 0 < loaded.lm_head.weight.std() < 0.1, "as transformers initialises it"
    body = m.from_pretrained(type(net.model), tmp_path / "two", config=m.config("llama"), prefix="model.model")
    assert torch.equal(body.embed_tokens.weight, net.model.embed_tokens.weight)


@on_ranks(1)
def test_a_body_that_was_saved_alone_is_found_by_a_model_with_a_head(tmp_path: Path) -> None:
    from tests.transformers.pretrained import models as m

    net = m.model("gpt2")
    dcp.save({"net": net.transformer}, tmp_path / "body")
    loaded = m.from_pretrained(m.AutoModelForCausalLM, tmp_path / "body", config=m.config("gpt2"))
    assert_same(m.seen(net), m.seen(loaded))


@on_ranks(1)
def test_nothing_that_a_configuration_names_is_fetched_or_executed(tmp_path: Path) -> None:
    from tests.transformers.pretrained import models as m

    dcp.save({"model": m.model("llama")}, tmp_path)
    m.config("llama").save_pretrained(tmp_path)
    told = json.loads((tmp_path / "config.json").read_text())
    hostile = {
        "kernel": {"_attn_implementation": "somebody/kernel"},
        "code": {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}},
    }
    (tmp_path / "evil.py").write_text("raise SystemExit('executed')")
    (tmp_path / "config.json").write_text(json.dumps({**told, **hostile["kernel"]}))
    with pytest.raises(dcp.UnsafeCheckpoint, match="'somebody/kernel', code that would be fetched"):
        m.from_pretrained(m.AutoModelForCausalLM, tmp_path)
    assert m.from_pretrained(m.AutoModelForCausalLM, tmp_path, attn_implementation="eager").training is False
    (tmp_path / "config.json").write_text(json.dumps({**told, **hostile["code"]}))
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        m.from_pretrained(m.AutoModelForCausalLM, tmp_path)
    adapters = {"peft_type": "LORA", "target_modules": ["q_proj"], "megatron_core": "evil", "megatron_config": {"a": 1}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapters))
    with pytest.raises(dcp.UnsafeCheckpoint, match="has megatron_config"):
        m.from_pretrained(m.AutoModelForCausalLM, tmp_path, config=m.config("llama"))


@on_ranks(1)
def test_a_checkpoint_in_a_bucket_has_its_configuration_beside_it(bucket: Bucket) -> None:
    from tests.transformers.pretrained import models as m

    net = m.model("gpt2")
    path = f"{bucket.url}/run/checkpoint-1"
    checkpointer = dcp.Checkpointer()
    checkpointer.save({"model": net}, path, files=m.config("gpt2").save_pretrained)
    checkpointer.close()
    loaded = m.from_pretrained(m.AutoModelForCausalLM, path)
    assert_same(m.seen(net), m.seen(loaded))
