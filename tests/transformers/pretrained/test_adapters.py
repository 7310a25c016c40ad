"""A model with adapters: with its base in the checkpoint, or the adapters alone and the base elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import dcp_plugin as dcp
from tests import launch
from tests.compare import assert_same


def _save(root: Path) -> dict[str, Any]:
    """Under FSDP2: all of it, and the adapters alone, as the Trainer does."""
    import torch
    import torch.distributed as dist
    from peft import LoraConfig, get_peft_model

    from dcp_plugin.transformers._transformers import adapters_of
    from tests.transformers.pretrained import models as m

    net = get_peft_model(m.model("llama"), LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])).eval()
    for name, parameter in net.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    adapters, found = net.peft_config["default"], m.seen(net)
    m.shard(net)
    dcp.save({"model": net}, root / "all")
    dcp.save({"model": adapters_of(net, net)}, root / "adapters")
    if dist.get_rank() == 0:
        m.model("llama").save_pretrained(root / "base")
        m.config("llama").save_pretrained(root / "all")
        dcp.Checkpointer(solo=True).save({"net": m.model("llama")}, root / "base-checkpoint")
        adapters.base_model_name_or_path = str(root / "base")
        adapters.save_pretrained(root / "all")
        adapters.save_pretrained(root / "adapters")
    return found


def _load(root: Path, sharded: bool) -> list[dict[str, Any]]:
    from tests.transformers.pretrained import models as m

    where: dict[str, Any] = {"base": root / "base-checkpoint", "config": m.config("llama")}
    found = []
    for name, base in (("all", {}), ("adapters", {}), ("adapters", where)):
        how = {"parallelize": m.shard} if sharded else {}
        net, report = m.from_pretrained(m.AutoModelForCausalLM, root / name, output_loading_info=True, **base, **how)
        assert type(net.base_model).__name__ == "LoraModel" and not net.training
        assert report.missing == report.unexpected == []
        assert net.peft_config["default"].base_model_name_or_path == str(root / "base")
        found.append(m.seen(net))
    return found


def _refused(root: Path) -> str:
    """What is said about adapters whose base is not there."""
    from tests.transformers.pretrained import models as m

    settings = root / "adapters" / "adapter_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "base_model_name_or_path": "meta/Llama"}))
    with pytest.raises(dcp.CheckpointMismatch) as caught:
        m.from_pretrained(m.AutoModelForCausalLM, root / "adapters", config=m.config("llama"))
    return str(caught.value)


def test_adapters_are_loaded_with_their_base(tmp_path: Path) -> None:
    saved = launch.run(_save, 2, tmp_path)[0]
    for ranks in (1, 2):
        for loaded in launch.run(_load, ranks, tmp_path, ranks == 2)[0]:
            assert_same(saved, loaded)
    said = launch.run(_refused, 1, tmp_path)[0]
    assert "has only adapters" in said and "base=" in said and "'meta/Llama'" in said
