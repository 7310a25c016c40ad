"""A module that was saved inside of a larger one, or the other way round, is found by its names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dcp_plugin as dcp
from dcp_plugin.core.loading.renames import find_prefix
from tests import launch
from tests.compare import assert_same
from tests.launch import on_ranks
from tests.layouts import WORLD_SIZE, build, train, whole_state
from tests.messages import warned


class Around(nn.Module):
    """What frameworks put around a user's model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.net = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)  # type: ignore[no-any-return]


def _wrapped(layout: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = build(layout, seed)
    return Around(model), optimizer


def _without(prefix: str, state: dict[str, Any]) -> dict[str, Any]:
    return {key.replace(prefix, ""): value for key, value in state.items()}


def _save(root: Path) -> None:
    for name, (model, optimizer) in {"bare": build("ddp"), "inside": _wrapped("ddp", 0)}.items():
        train(model, optimizer, 2)
        dcp.save({"model": model, "optim": optimizer}, root / name)
        state = _without("net.", whole_state(model, optimizer))
        if torch.distributed.get_rank() == 0:
            torch.save(state, root / f"{name}.pt")


@pytest.fixture
def of_ddp(tmp_path: Path) -> Path:
    """Checkpoints of a model, and of the same inside of another one; with the state of each."""
    launch.run(_save, 2, tmp_path)
    return tmp_path


@pytest.mark.one_of
@pytest.mark.parametrize("layout", ["plain", "ddp", "fsdp1", "fsdp2"])
@on_ranks(of=lambda layout: WORLD_SIZE[layout])
def test_a_prefix_is_found_for_model_and_optimizer_in_both_directions(of_ddp: Path, layout: str) -> None:
    for name, other in {"bare": _wrapped(layout, 1), "inside": build(layout, 1)}.items():
        with warned() as messages:
            report = dcp.load({"model": other[0], "optim": other[1]}, of_ddp / name)
        said = [message for message in messages if "loaded from there" in message]
        if torch.distributed.get_rank() == 0:
            assert len(said) == 1 and "net." in said[0]
        assert not report.missing and not report.unexpected
        saved = torch.load(of_ddp / f"{name}.pt", weights_only=True)
        assert_same(saved, _without("net.", whole_state(*other)))


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
