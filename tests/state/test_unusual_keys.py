"""Keys and containers that a file cannot hold: they come back as they were, or the first save names them."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock

import dcp_plugin as dcp


@pytest.mark.parametrize("key", [b"x", frozenset([1]), 1 + 2j, torch.float32, (1, b"x")], ids=str)
@pytest.mark.parametrize("kind", [dict, OrderedDict])
@pytest.mark.parametrize("saved_by", ["stock", "ours"])
def test_a_tensor_comes_back_under_its_key(tmp_path: Path, key: Any, kind: type, saved_by: str) -> None:
    def state(value: float) -> dict[str, Any]:
        return {"s": kind({key: torch.full((2,), value), "n": int(value)})}

    if saved_by == "ours":
        dcp.save(state(1), tmp_path / "a")
    else:
        stock.save(state(1), checkpoint_id=tmp_path / "a")
    loaded = state(0)
    dcp.load(loaded, tmp_path / "a")
    assert type(loaded["s"]) is kind and list(loaded["s"]) == [key, "n"] and loaded["s"][key].tolist() == [1, 1]
    dcp.save(loaded, tmp_path / "b")
    again = state(0)
    stock.load(again, checkpoint_id=tmp_path / "b")
    assert again["s"][key].tolist() == [1, 1] and again["s"]["n"] == 1


class Returns:
    def __init__(self, state: Any) -> None:
        self.state_dict = lambda: state

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError


def _cyclic(container: Any, place: Any) -> Any:
    if isinstance(container, list):
        container.append(container)
    else:
        container[place] = {"above": container}
    return container


def _deep() -> Any:
    tree: Any = 1
    for _ in range(3000):
        tree = [tree]
    return tree


REFUSED = {
    "mapping": ({"s": _cyclic({}, "below")}, r"s.below.above is s, which contains it.* Leave it out"),
    "list": ({"s": {"l": _cyclic([1], 0)}}, r"s.l.1 is s.l, which contains it.* Leave it out"),
    "tuple": ({"s": {"l": (1, _cyclic([1], 0))}}, r"s.l.1.1 is s.l.1, which contains it.* Leave it out"),
    "the state": (_cyclic({}, "s"), r"s.above is the state, which contains it.* Leave it out"),
    "state dict": (
        {"s": Returns(_cyclic({}, "below"))},
        r"s has too many containers in each other, or one in itself.* Leave it out",
    ),
    "deep": ({"s": {"l": _deep()}}, r"s has too many containers in each other, or one in itself.* Leave it out"),
    "surrogate": ({"s": {"a\ud800": torch.ones(2)}}, r"the key 's.a\\ud800' has half of a surrogate .* Rename the key"),
    "surrogate of a value": ({"a\ud800": 1}, r"the key 'a\\ud800' has half of a surrogate .* Rename the key"),
    "integer": ({"s": {"i": 10**5000}}, r"s.i cannot be saved: .* digits.* Save the number as text, hex\(number\)"),
    "integer in a list": (
        {"s": {"i": [1, 10**5000]}},
        r"s.i cannot be saved: .* Save the number as text, hex\(number\)",
    ),
    "object": ({"s": {object(): torch.ones(2)}}, r"s.<object .*> is under a key of type object.* Use text or a number"),
    "set": ({"s": {frozenset("ab"): torch.ones(2)}}, r"under a key of type frozenset.* Use text or a number"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_refusal_names_the_key_the_reason_and_the_way_out(tmp_path: Path, kind: str) -> None:
    state, message = REFUSED[kind]
    with pytest.raises(dcp.CheckpointError, match=message):
        dcp.save(state, tmp_path / "step-1")
    assert dcp.latest(tmp_path) is None


@pytest.mark.parametrize("below", ["t", "u.t"])
def test_a_tensor_takes_the_place_of_no_mapping(tmp_path: Path, below: str) -> None:
    def state(value: float, *, nested: bool) -> dict[str, Any]:
        tree: Any = torch.full((2,), value)
        for name in reversed([*(below.split(".") if nested else below.split(".")[:-1])]):
            tree = {name: tree}
        return {"t": tree, "n": int(value)}

    stock.save(state(1, nested=False), checkpoint_id=tmp_path)
    target = state(0, nested=True)
    with pytest.raises(dcp.CheckpointMismatch, match=rf"t\.{below} is not in the checkpoint"):
        dcp.load(target, tmp_path)
    dcp.load(target, tmp_path, strict=False)
    assert str(target) == str(state(0, nested=True) | {"n": 1})
