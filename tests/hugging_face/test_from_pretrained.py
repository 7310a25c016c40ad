"""A model of transformers from the shards that other ranks have saved: equal logits, equal bytes, nothing else read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import launch
from tests.compare import assert_same
from tests.hugging_face import KINDS


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Saved under FSDP2 on two ranks: where, and what each model is."""
    root = tmp_path_factory.mktemp("saved")
    return root, launch.run(_save, 2, root)[0]


def _save(root: Path) -> dict[str, Any]:
    from tests.hugging_face import models as m

    return m.save_sharded(root)


def _load(root: Path, way: str) -> dict[str, Any]:
    import dcp_plugin as dcp
    from tests.hugging_face import models as m

    ways: dict[str, Any] = {
        "parallelize": {"parallelize": m.shard},
        "distributed_config": {"distributed_config": {"fsdp_size": 2}},
    }
    found = {}
    for kind in KINDS:
        net = dcp.hf.from_pretrained(m.AutoModelForCausalLM, root / kind, config=m.config(kind), **ways.get(way, {}))
        assert not net.training
        found[kind] = m.seen(net)
    return found


@pytest.mark.parametrize(("way", "ranks"), [("single", 1), ("parallelize", 2), ("distributed_config", 2)])
def test_a_model_is_loaded_as_it_was_saved(saved: tuple[Path, dict[str, Any]], way: str, ranks: int) -> None:
    root, models = saved
    for found in launch.run(_load, ranks, root, way):
        for kind in KINDS:
            assert_same(models[kind], found[kind])
