"""Small models, made here, and what can be asked of them. Functions here run on ranks of ``tests.launch``."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import warnings
from typing import Any

import peft  # noqa: F401  (once, in the server that ranks are forked from)
import torch
import transformers
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from dcp_plugin.transformers import from_pretrained as from_pretrained
from tests.compare import full_state
from tests.transformers.trainer.training import portable

warnings.filterwarnings("ignore", module="transformers|accelerate|peft")
transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()


def config(kind: str, width: int = 16) -> Any:
    """GPT-2 ties its head to its embedding; Llama may, and has buffers that no checkpoint has."""
    if kind == "gpt2":
        return GPT2Config(
            vocab_size=32, n_positions=8, n_embd=width, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
        )
    return LlamaConfig(
        vocab_size=32,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=8,
        tie_word_embeddings=kind == "llama-tied",
    )


def model(kind: str, seed: int = 0, width: int = 16) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config(kind, width)).eval()


def shard(net: Any) -> Any:
    """Each layer, and what is left."""
    for layer in (module for name, module in net.named_modules() if name.rpartition(".")[2].isdecimal()):
        fully_shard(layer)
    return fully_shard(net)


def stepped(net: nn.Module) -> torch.optim.Optimizer:
    """An optimizer with a state, after a step."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    net(input_ids=ids(), labels=ids()).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def ids() -> torch.Tensor:
    return torch.arange(16).view(2, 8)


def seen(net: Any) -> dict[str, Any]:
    """Logits, and every parameter and buffer whole, with its dtype. Collective for a sharded model."""
    with torch.no_grad():
        logits = net(input_ids=ids()).logits
    tensors = {**dict(net.named_parameters(remove_duplicate=False)), **dict(net.named_buffers())}
    return {"logits": portable(logits)} | {key: portable(value) for key, value in full_state(tensors).items()}
