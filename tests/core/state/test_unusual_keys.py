"""Keys and containers that a file cannot hold: they come back as they were, or the first save names them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
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


class Bounded(dict[str, Any]):
    """Mapping that a walk may enter a hundred times."""

    entered = 0

    def _enter(self) -> None:
        self.entered += 1
        assert self.entered <= 100

    def items(self) -> Any:
        self._enter()
        return super().items()

    def values(self) -> Any:
        self._enter()
        return super().values()

    def __iter__(self) -> Iterator[str]:
        self._enter()
        return super().__iter__()


TWICE: dict[str, Callable[[Any], Any]] = {
    "lists": lambda inner: [inner, inner],
    "tuples": lambda inner: (inner, inner),
    "mappings": lambda inner: {"a": inner, "b": inner},
}


@pytest.mark.parametrize("kind", TWICE)
@pytest.mark.parametrize("wrapped", [dict, lambda tree: {"n": Returns(tree)}], ids=["state", "state dict"])
def test_containers_that_share_another_at_every_level_are_refused(
    tmp_path: Path, kind: str, wrapped: Callable[[Any], Any]
) -> None:
    tree: Any = Bounded(leaf=torch.ones(1))
    for _ in range(40):
        tree = TWICE[kind](tree)
    for call in (dcp.save, dcp.load):
        with pytest.raises(dcp.CheckpointError, match=r"s\S* has \d{6} parts, .* are shared.* Leave it out"):
            call({"s": wrapped({"x": tree})}, tmp_path / "ck")
        dcp.save({"s": {"x": 1}}, tmp_path / "ck")


def test_a_state_may_share_containers(tmp_path: Path) -> None:
    shared = {"a": torch.ones(2)}
    state = {"s": {"x": [shared, shared], "y": (shared, 1)}}
    dcp.save(state, tmp_path / "ck")
    assert dcp.diff(tmp_path / "ck", tmp_path / "ck").equal
    assert dcp.read(tmp_path / "ck")["s.x.1.a"].tolist() == [1, 1]


REFUSED = {
    "mapping": ({"s": _cyclic({}, "below")}, r"s.below.above is s, which contains it.* Leave it out"),
    "list": ({"s": {"l": _cyclic([1], 0)}}, r"s.l.1 is s.l, which contains it.* Leave it out"),
    "tuple": ({"s": {"l": (1, _cyclic([1], 0))}}, r"s.l.1.1 is s.l.1, which contains it.* Leave it out"),
    "the state": (_cyclic({}, "s"), r"s.above is the state, which contains it.* Leave it out"),
    "state dict": ({"s": Returns(_cyclic({}, "below"))}, r"s.below.above is s, which contains it.* Leave it out"),
    "deep": ({"s": {"l": _deep()}}, r"s has too many containers in each other.* Leave it out"),
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
