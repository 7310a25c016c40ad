"""A repeated save exchanges digests instead of plans, and never writes what an outdated plan says."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dcp_plugin as dcp
from dcp_plugin.core.format.keys import encode_state
from dcp_plugin.core.format.metadata import stock_path
from dcp_plugin.core.format.stock_objects import metadata_of
from dcp_plugin.core.planning.local_inventory import LocalInventory
from dcp_plugin.core.planning.save import PlanExchange
from dcp_plugin.core.ranks.collectives import Ranks
from dcp_plugin.core.tensors._torch import sharded_value
from tests.compare import same_bytes
from tests.launch import on_ranks
from tests.layouts import build, train

State = dict[str, Any]


def _state() -> State:
    """Of rank 0: ``shared`` is written by both ranks, ``mine`` by the only one that has it."""
    generator = torch.Generator().manual_seed(0)
    shared = sharded_value(torch.randn(700, 300, generator=generator), any_rank=True)
    mine = torch.arange(6.0) + dist.get_rank()
    return {"shared": shared, f"mine{dist.get_rank()}": mine, "tied": mine, "text": "short", "list": [1, torch.ones(2)]}


CHANGES: dict[str, Callable[[State], Any]] = {
    "another dtype": lambda state: state.update(mine1=state["mine1"].double()),
    "another shape": lambda state: state.update(mine1=state["mine1"].reshape(2, 3)),
    "no longer tied": lambda state: state.update(mine1=state["mine1"] + 100),
    "another key": lambda state: state.update(new=5),
    "another path": lambda state: state.update(list={0: 1, 1: torch.ones(2)}),
    "a key less": lambda state: state.pop("mine1"),
}


@on_ranks(2)
def test_a_plan_is_not_used_again_after_a_change_on_any_rank(tmp_path: Path) -> None:
    with closing(dcp.Checkpointer(timeout=30)) as ours:
        for name, change in CHANGES.items():
            for when in ("before", "after"):
                state = _state()
                if when == "after" and dist.get_rank() == 1:
                    change(state)
                path = tmp_path / f"{name}-{when}"
                ours.save(state, path)
                assert not ours._saving.exchange.repeated, name
                _check(state, path)


def _check(state: State, path: Path) -> None:
    """Both ranks find their own tensors in the checkpoint, in kind, and rank 0 the rest too."""
    for key, saved in state.items():
        if isinstance(saved, torch.Tensor) and (key.startswith("mine") or dist.get_rank() == 0):
            found = torch.zeros_like(saved)
            report = dcp.Checkpointer(solo=True).load({key: found}, path)
            assert same_bytes(found, saved) and not report.cast, (path, key)
    assert dcp.verify(path).ok
    index = dcp.ShardedReader(path).index
    assert {key for key in index if not key.startswith("list")} >= {key for key in state if key != "list"}
    if dist.get_rank() == 0:
        assert index.path_of("list.0") == ("list", 0)


@on_ranks(2)
def test_a_plan_is_used_again_while_nothing_of_it_has_changed_on_any_rank(tmp_path: Path) -> None:
    with closing(dcp.Checkpointer(timeout=30)) as ours:
        state = _state()
        ours.save(state, tmp_path / "first")
        assert not ours._saving.exchange.repeated
        for text in ("a longer text", "a text that is longer still" * 100):
            state["text"] = text
            state["shared"].chunks[0].tensor.add_(1)
            ours.save(state, tmp_path / "again")
            assert ours._saving.exchange.repeated
            target = {"text": "", "shared": torch.zeros(700, 300)}
            dcp.Checkpointer(solo=True).load(target, tmp_path / "again")
            assert target["text"] == text
            assert same_bytes(target["shared"], state["shared"].chunks[0].tensor)  # type: ignore[arg-type]
            dist.barrier()
        if dist.get_rank() == 1:
            ours._saving.exchange._last = None  # as after a failure that only this rank has seen
        ours.save(state, tmp_path / "forgotten")
        assert not ours._saving.exchange.repeated
        ours.save(state, tmp_path / "remembered")
        assert ours._saving.exchange.repeated


@on_ranks(2)
def test_the_plan_of_a_training_is_used_again_from_the_second_save_on(tmp_path: Path) -> None:
    model, optimizer = build("fsdp2")
    with closing(dcp.Checkpointer(timeout=30)) as ours:
        for step in range(3):
            train(model, optimizer, 1)
            ours.save({"model": model, "optim": optimizer, "step": step}, tmp_path / f"step{step}")
            assert ours._saving.exchange.repeated == (step > 0)
            assert dcp.verify(tmp_path / f"step{step}").ok


def test_the_stock_metadata_is_what_pickling_the_objects_would_give(tmp_path: Path) -> None:
    state = {
        "tensors": {str(dtype): torch.ones(3, 2, 5).to(dtype) for dtype in (torch.float32, torch.int8, torch.bool)},
        "scalar": torch.tensor(1.5),
        "empty": torch.zeros(0, 4),
        "values": [1, {"a": None, 3: "x"}, (torch.ones(2),)],
        "ünï": "côdé",
    }
    dcp.save(state, tmp_path / "ck")
    expected = metadata_of(dcp.ShardedReader(tmp_path / "ck").index)
    found = pickle.loads((tmp_path / "ck" / ".metadata").read_bytes())
    assert found.state_dict_metadata == expected.state_dict_metadata
    assert list(found.state_dict_metadata) == list(expected.state_dict_metadata)
    assert found.storage_data == expected.storage_data
    assert found.planner_data == {key: stock_path(path) for key, path in expected.planner_data.items()}
    assert found.storage_meta.checkpoint_id == str(tmp_path / "ck")


def test_stock_metadata_holds_offsets_beyond_32_bits() -> None:
    from dcp_plugin.core.format.derived_index import index_of
    from dcp_plugin.core.format.index import Location, StoredChunk, StoredTensor
    from dcp_plugin.core.format.metadata import encode

    where = Location("__0_0.distcp", 1 << 40, 100, None, 0)
    chunk = StoredChunk((0,), (1 << 33,), where)
    index = index_of([("t", StoredTensor(torch.uint8, (1 << 33,), (chunk,)))], {"__0_0.distcp": 1 << 41})
    found = pickle.loads(encode(index, None))
    assert found.state_dict_metadata["t"].chunks[0].sizes == torch.Size([1 << 33])
    assert next(iter(found.storage_data.values())).offset == 1 << 40


class _Counted(Ranks):
    """Notes the bytes of what a rank sends."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[int] = []

    def combine(self, step: str, work: Any, combine: Any) -> Any:
        self.sent.append(len(pickle.dumps(work())))
        return super().combine(step, work, combine)


def test_a_rank_sends_96_bytes_at_most_for_the_plan_of_a_repeated_save(tmp_path: Path) -> None:
    state = encode_state({f"layer{number}": torch.zeros(4, 4) for number in range(300)})
    exchange, ranks, inventory = PlanExchange(), _Counted(), LocalInventory.of_state(state, {})
    for _ in range(2):
        claim = partial(exchange.claim, tmp_path, ranks, state, inventory, doubtful=bytes(range(16)))
        exchange.plan("plan", ranks, inventory, ranks.combine("plan", claim, exchange.answer))
    assert exchange.repeated
    assert ranks.sent[-1] <= 96
