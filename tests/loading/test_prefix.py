"""A module that was saved inside of a larger one, or the other way round, is found by its names."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dcp_plugin as dcp
from dcp_plugin.loading.renames import find_prefix
from tests import launch
from tests.compare import assert_same
from tests.layouts import WORLD_SIZE, build, train, whole_state


class Around(nn.Module):
    """What frameworks put around a user's model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.net = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)  # type: ignore[no-any-return]


LAYOUTS = ["plain", "ddp", "fsdp1", "fsdp2"]


def _wrapped(layout: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = build(layout, seed)
    return Around(model), optimizer


def _without(prefix: str, state: dict[str, Any]) -> dict[str, Any]:
    return {key.replace(prefix, ""): value for key, value in state.items()}


def _save(root: Path, layout: str) -> None:
    for name, (model, optimizer) in {"bare": build(layout), "inside": _wrapped(layout, 0)}.items():
        train(model, optimizer, 2)
        dcp.save({"model": model, "optim": optimizer}, root / f"{name}-{layout}")
        state = _without("net.", whole_state(model, optimizer))
        if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
            torch.save(state, root / f"{name}-{layout}.pt")


def _load(root: Path, layout: str, source: str) -> None:
    for name, other in {"bare": _wrapped(layout, 1), "inside": build(layout, 1)}.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            report = dcp.load({"model": other[0], "optim": other[1]}, root / f"{name}-{source}")
        said = [str(w.message) for w in caught if "loaded from there" in str(w.message)]
        if torch.distributed.get_rank() == 0:
            assert len(said) == 1 and "net." in said[0]
        assert not report.missing and not report.unexpected
        saved = torch.load(root / f"{name}-{source}.pt", weights_only=True)
        assert_same(saved, _without("net.", whole_state(*other)))


@pytest.mark.one_of
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_prefix_is_found_for_model_and_optimizer_in_both_directions(tmp_path: Path, layout: str) -> None:
    launch.run(_save, 2, tmp_path, "ddp")
    launch.run(_load, WORLD_SIZE[layout], tmp_path, layout, "ddp")


def test_only_a_prefix_that_explains_everything_and_is_the_only_one_is_taken() -> None:
    assert find_prefix(["a.w", "a.b"], ["net.a.w", "net.a.b", "loss.w"]) == ("", "net.")
    assert find_prefix(["net.a.w", "seen"], ["a.w"]) == ("net.", "")
    assert find_prefix(["a.w", "a.b"], ["net.a.w"]) is None
    assert find_prefix(["w"], ["student.w", "teacher.w"]) is None
    assert find_prefix(["w"], []) is None
    assert find_prefix([], ["w"]) is None


def test_two_candidates_are_an_error_that_names_the_keys(tmp_path: Path) -> None:
    both = nn.ModuleDict({"student": nn.Linear(2, 2), "teacher": nn.Linear(2, 2)})
    dcp.save({"model": both}, tmp_path / "ck")
    with pytest.raises(dcp.CheckpointMismatch, match="weight is not in the checkpoint"):
        dcp.load({"model": nn.Linear(2, 2)}, tmp_path / "ck")
