"""A model of transformers from the shards that other ranks have saved: equal logits, equal bytes, nothing else read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import dcp_plugin as dcp
from tests import launch
from tests.compare import assert_same
from tests.launch import on_ranks
from tests.transformers.pretrained import KINDS


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Saved on two ranks: where, and what each model is."""
    root = tmp_path_factory.mktemp("saved")
    return root, launch.run(_save, 2, root)[0]


def _save(root: Path) -> dict[str, Any]:
    """Under FSDP2, after a step, with the optimizer."""
    from tests.transformers.pretrained import models as m

    found = {}
    for kind in KINDS:
        net = m.shard(m.model(kind))
        dcp.save({"model": net, "optim": m.stepped(net)}, root / kind)
        found[kind] = m.seen(net)
    return found


def _load(root: Path, ways: tuple[str, ...]) -> list[dict[str, Any]]:
    """The models, sharded in each of these ways."""
    from tests.transformers.pretrained import models as m

    known: dict[str, Any] = {
        "single": {},
        "parallelize": {"parallelize": m.shard},
        "distributed_config": {"distributed_config": {"fsdp_size": 2}},
    }
    found = []
    for way in ways:
        models = {}
        for kind in KINDS:
            net = m.from_pretrained(m.AutoModelForCausalLM, root / kind, config=m.config(kind), **known[way])
            assert not net.training
            models[kind] = m.seen(net)
        found.append(models)
    return found


@pytest.mark.one_of
@pytest.mark.parametrize(("ranks", "ways"), [(1, ("single",)), (2, ("parallelize", "distributed_config", "single"))])
def test_a_model_is_loaded_as_it_was_saved(
    saved: tuple[Path, dict[str, Any]], ranks: int, ways: tuple[str, ...]
) -> None:
    root, models = saved
    for found in launch.run(_load, ranks, root, ways):
        for loaded in found:
            for kind in KINDS:
                assert_same(models[kind], loaded[kind])


@pytest.mark.long
def test_a_model_is_loaded_on_more_ranks(saved: tuple[Path, dict[str, Any]]) -> None:
    root, models = saved
    for (found,) in launch.run(_load, 4, root, ("parallelize",)):
        for kind in KINDS:
            assert_same(models[kind], found[kind])


@on_ranks(2)
def test_each_rank_reads_its_shards_and_nothing_of_the_optimizer(tmp_path: Path) -> None:
    """Of a model whose parameters are larger than what a reader would rather read than skip."""
    import torch.distributed as dist

    from tests.transformers.pretrained import models as m

    net = m.shard(m.model("llama", width=256))
    dcp.save({"model": net, "optim": m.stepped(net)}, tmp_path / "run")
    nbytes = sum(parameter.numel() * parameter.element_size() for parameter in net.parameters())
    _, report = m.from_pretrained(
        m.AutoModelForCausalLM,
        tmp_path / "run",
        config=m.config("llama", width=256),
        parallelize=m.shard,
        output_loading_info=True,
        checkpoint_config=dcp.CheckpointConfig(io=dcp.IO(broadcast=False)),
    )
    assert not any(key.startswith("optim") for key in report.loaded)
    read: list[Any] = [None, None]
    dist.all_gather_object(read, report.bytes_read)
    assert max(read) <= 0.55 * nbytes, (read, nbytes)
    assert sum(read) >= nbytes
