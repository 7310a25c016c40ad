"""Models with adapters of each method, saved in each way. Functions here run on ranks of ``tests.launch``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig

import dcp_plugin as dcp
from tests.transformers.pretrained import models as m
from tests.transformers.trainer import training as t

LAYERS: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
PROMPTS: dict[str, Any] = {"num_virtual_tokens": 2, "task_type": "CAUSAL_LM"}
METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "lora": (peft.LoraConfig, LAYERS),
    "lora, its biases": (peft.LoraConfig, {**LAYERS, "bias": "lora_only"}),
    "lora, all biases": (peft.LoraConfig, {**LAYERS, "bias": "all"}),
    "rslora": (peft.LoraConfig, {**LAYERS, "use_rslora": True}),
    "dora": (peft.LoraConfig, {**LAYERS, "use_dora": True}),
    "tokens": (peft.LoraConfig, {**LAYERS, "trainable_token_indices": [1, 2]}),
    "modules_to_save": (peft.LoraConfig, {**LAYERS, "modules_to_save": ["lm_head"]}),
    "ia3": (
        peft.IA3Config,
        {**LAYERS, "target_modules": ["q_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    ),
    "loha": (peft.LoHaConfig, LAYERS),
    "lokr": (peft.LoKrConfig, LAYERS),
    "oft": (peft.OFTConfig, {**LAYERS, "oft_block_size": 4, "r": 0}),
    "hra": (peft.HRAConfig, LAYERS),
    "layer norms": (peft.LNTuningConfig, {**LAYERS, "target_modules": ["input_layernorm"]}),
    "token embeddings": (peft.TrainableTokensConfig, {"token_indices": [1, 2], "target_modules": ["embed_tokens"]}),
    "vera": (peft.VeraConfig, {**LAYERS, "target_modules": ["q_proj"], "r": 4}),
    "vera, no projections": (peft.VeraConfig, {**LAYERS, "target_modules": ["q_proj"], "save_projection": False}),
    "prompt": (peft.PromptTuningConfig, PROMPTS),
    "prefix": (peft.PrefixTuningConfig, PROMPTS),
    "prefix, projected": (peft.PrefixTuningConfig, {**PROMPTS, "prefix_projection": True, "encoder_hidden_size": 8}),
    "p-tuning": (peft.PromptEncoderConfig, {**PROMPTS, "encoder_hidden_size": 8}),
    "vblora": (peft.VBLoRAConfig, {**LAYERS, "target_modules": ["q_proj"], "vector_length": 8, "num_vectors": 16}),
}


def base(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "attention_bias": True}
    return AutoModelForCausalLM.from_config(LlamaConfig(**sizes, **heads, max_position_embeddings=16)).eval()


def save(root: Path, method: str, way: str) -> None:
    """Save a trained model as ``root / "ck"``; what peft itself saves of it is ``root / "peft"``."""
    kind, settings = METHODS[method]
    base().save_pretrained(root / "base")
    net = peft.get_peft_model(base(), kind(**settings))
    net.peft_config["default"].base_model_name_or_path = str(root / "base")
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in trained:
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    if way == "trainer":
        trainer = t.trainer(root, net=net, max_steps=1, save_steps=1)
        trainer.train()
        (root / "checkpoint-1").rename(root / "ck")
        net.save_pretrained(root / "peft")
        return
    if torch.distributed.get_rank() == 0:
        net.save_pretrained(root / "peft")
    torch.distributed.barrier()
    if way == "fsdp2":
        m.shard(net)
        trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.0, weight_decay=0.0)
    net(input_ids=m.ids(), labels=m.ids()).loss.backward()
    optimizer.step()
    dcp.save({"model": net, "optim": optimizer}, root / "ck")


def _logits(net: Any) -> Any:
    with torch.no_grad():
        return m.portable(net.eval()(input_ids=m.ids()).logits)


def _merged(net: Any) -> Any:
    return _logits(net.merge_and_unload()) if hasattr(net.base_model, "merge_and_unload") else None


def _of_peft(root: Path, folder: Path, base_model: Any) -> Any:
    return peft.PeftModel.from_pretrained(base_model, str(folder))


def read(root: Path, how: str) -> tuple[Any, Any]:
    """Return what is made of the checkpoint, and of peft's own folder."""
    stock = _of_peft(root, root / "peft", base())
    if how != "export":
        loaded = m.from_pretrained(AutoModelForCausalLM, root / "ck", adapter_config=stock.peft_config["default"])
        return (_merged if how == "merged" else _logits)(loaded), (_merged if how == "merged" else _logits)(stock)
    dcp.export(root / "ck", root / "out", "hf", config=root / "peft")
    files = [load_file(folder / "adapter_model.safetensors") for folder in (root / "out", root / "peft")]
    exported = base(seed=9) if (root / "out" / "model.safetensors").exists() else base()
    if (root / "out" / "model.safetensors").exists():
        missing, unexpected = exported.load_state_dict(load_file(root / "out" / "model.safetensors"), strict=False)
        assert not missing and not unexpected
    ours, theirs = ({key: m.portable(value) for key, value in file.items()} for file in files)
    loaded = _of_peft(root, root / "out", exported)
    return (ours, _logits(loaded)), (theirs, _logits(stock))
