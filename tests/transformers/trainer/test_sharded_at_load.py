"""A model that ``from_pretrained(distributed_config=…)`` has sharded: transformers refuses to resume it, we do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import dcp_plugin as dcp
from tests import launch
from tests.compare import assert_same
from tests.launch import on_ranks
from tests.transformers.trainer import Ran


def _trainer(root: Path, **options: Any) -> Any:
    """Sharded over all ranks; one rank has all of it."""
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    from tests.transformers.trainer import training as t

    size, initial = dist.get_world_size(), root / "initial"
    if dist.get_rank() == 0 and not initial.exists():
        t.model().save_pretrained(initial)
    dist.barrier()
    net = AutoModelForCausalLM.from_pretrained(initial, distributed_config={"fsdp_size": size, "fsdp_plan": _PLAN})
    return t.trainer(root / "run", "single" if size == 1 else "ddp", net=net, **options)


_PLAN = {"transformer.h.*": "free_full_weight"}


def _train(root: Path, resume: Path | None = None) -> Ran:
    from tests.transformers.trainer import training as t

    trainer = _trainer(root, save_strategy="steps" if resume is None else "no")
    assert trainer.model.is_distributed_loading_by_transformers and not trainer.args.save_only_model
    return t.run(trainer, resume)


def _begin(root: Path) -> Any:
    from tests.transformers.trainer import training as t

    return t.begin(_trainer(root), root / "run" / "checkpoint-6").state


def _trained(root: Path) -> Any:
    straight = launch.run(_train, 2, root)[0]
    path = root / "run" / "checkpoint-3"
    assert {"optim", "model"} <= {tensor.key.partition(".")[0] for tensor in dcp.inspect(path).tensors}
    assert not list(path.glob("*.safetensors"))
    saved = json.loads((path / "config.json").read_text())
    assert saved["model_type"] == "gpt2" and "distributed_config" not in saved
    return straight


def test_a_model_that_was_sharded_at_load_resumes_bit_for_bit(tmp_path: Path) -> None:
    straight = _trained(tmp_path)
    resumed = launch.run(_train, 2, tmp_path, tmp_path / "run" / "checkpoint-3")[0]
    assert_same(straight.state, resumed.state)
    assert resumed.losses == {step: straight.losses[step] for step in (4, 5, 6)}
    assert resumed.numbers == {step: straight.numbers[step] for step in (4, 5, 6)}
    assert_same(straight.state, launch.run(_begin, 1, tmp_path)[0])


@pytest.mark.long
def test_it_resumes_on_more_ranks(tmp_path: Path) -> None:
    straight = _trained(tmp_path)
    for state in launch.run(_begin, 4, tmp_path):
        assert_same(straight.state, state)


@on_ranks(2)
def test_transformers_refuses_such_a_model_for_what_we_set_for_the_moment(tmp_path: Path) -> None:
    from tests.transformers.trainer import training as t

    with pytest.raises(ValueError, match="Pass `save_only_model=True`"):
        _trainer(tmp_path, kind=t.OnCPU)
    assert _trainer(tmp_path, kind=t.OnCPU, save_only_model=True).is_distributed_loading_by_transformers
