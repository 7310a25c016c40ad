"""What loading relies on inside of transformers and PEFT: see ``dcp_plugin/transformers/_models.py`` if one fails."""

from __future__ import annotations

import inspect
from importlib.metadata import version

from torch.torch_version import TorchVersion

from tests.launch import on_ranks

TRANSFORMERS = TorchVersion(version("transformers"))


@on_ranks(1)
def test_names_that_loading_uses() -> None:
    import torch
    from transformers import PreTrainedModel
    from transformers import initialization as init

    from dcp_plugin.transformers import _models as ours
    from tests.transformers.pretrained import models as m

    assert callable(init.no_tie_weights)
    assert TRANSFORMERS < (5, 9) or callable(init.meta_device_safe_creation_ops)
    assert list(inspect.signature(PreTrainedModel._from_config).parameters) == ["config", "kwargs"]
    if TRANSFORMERS >= (5, 23):  # an earlier one shards nothing at the load
        assert list(inspect.signature(PreTrainedModel.prepare_distribute_model).parameters) == [
            "distributed_config",
            "device_map",
        ]
    net = ours.build(m.AutoModelForCausalLM, m.config("llama-tied"), torch.bfloat16, True, False, {})
    assert net.all_tied_weights_keys == {"lm_head.weight": "model.embed_tokens.weight"}
    assert net.lm_head.weight is net.model.embed_tokens.weight and net.lm_head.weight.is_meta
    apart = ours.build(m.AutoModelForCausalLM, m.config("llama-tied"), torch.bfloat16, False, False, {})
    assert apart.lm_head.weight is not apart.model.embed_tokens.weight
    no_keys = set() if TRANSFORMERS >= (5, 9) else None
    assert net._keys_to_ignore_on_load_missing == net._keys_to_ignore_on_load_unexpected == no_keys
    assert net._get_dtype_plan(torch.bfloat16) == {}


@on_ranks(1)
def test_the_initialisation_leaves_alone_what_is_marked() -> None:
    import torch

    from dcp_plugin.transformers import _models as ours
    from tests.transformers.pretrained import models as m

    net = m.model("llama")
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    frequencies = net.model.rotary_emb.inv_freq.clone()
    net.model.rotary_emb.inv_freq.zero_()
    for module in net.modules():
        module.__dict__.pop("_is_hf_initialized", None)
    ours.initialise(net, {"lm_head.weight"})
    changed = {name for name, p in net.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {"lm_head.weight"}
    assert torch.equal(net.model.rotary_emb.inv_freq, frequencies)


@on_ranks(1)
def test_what_peft_calls_a_layer_that_it_has_wrapped() -> None:
    import torch
    from peft import LoraConfig

    from dcp_plugin.transformers import _models as ours
    from tests.transformers.pretrained import models as m

    net = ours.build(m.AutoModelForCausalLM, m.config("llama"), torch.float32, True, False, {})
    before = {id(tensor): key for key, tensor in net.state_dict(keep_vars=True).items()}
    adapted = ours.peft_model_of(net, LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    after = {before[id(t)]: key for key, t in adapted.state_dict(keep_vars=True).items() if id(t) in before}
    assert len(after) == len(before)
    for name, key in after.items():
        assert ours.without_peft_layers(key) == f"base_model.model.{name}"
