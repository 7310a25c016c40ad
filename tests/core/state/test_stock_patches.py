"""Objects whose methods ``_patch_model_state_dict`` and ``_patch_optimizer_state_dict`` of torch have replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from torch import nn
from torch.distributed.checkpoint.state_dict import _patch_model_state_dict, _patch_optimizer_state_dict

import dcp_plugin as dcp
from tests import layouts
from tests.compare import assert_same
from tests.launch import on_ranks
from tests.layouts import Net, train, whole_state


def _patched(layout: str, seed: int) -> dict[str, Any]:
    model, optimizer = layouts.build(layout, seed)
    train(model, optimizer, 2, seed)
    _patch_model_state_dict(model)
    _patch_optimizer_state_dict(model, optimizers=(optimizer,))
    return {"model": model, "optim": optimizer}


FSDP1 = [("fsdp1", "ours", "ours"), ("fsdp1", "stock", "ours")]
"""Under FSDP1 stock cannot load what stock has saved where a rank has no part of a parameter."""


@pytest.mark.one_of
@pytest.mark.parametrize(
    ("layout", "saves", "loads"),
    [*FSDP1, *((a, *b) for a in ("ddp", "fsdp2") for b in (("ours", "ours"), ("ours", "stock"), ("stock", "ours")))],
)
@on_ranks(2)
def test_patched_objects_come_back_with_ours_and_with_stock(
    tmp_path: Path, layout: str, saves: str, loads: str
) -> None:
    saved, loaded = _patched(layout, seed=0), _patched(layout, seed=1)
    dcp.save(saved, tmp_path / "ck") if saves == "ours" else stock.save(saved, checkpoint_id=tmp_path / "ck")
    dcp.load(loaded, tmp_path / "ck") if loads == "ours" else stock.load(loaded, checkpoint_id=tmp_path / "ck")
    assert_same(whole_state(loaded["model"], loaded["optim"]), whole_state(saved["model"], saved["optim"]))


@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: torch.compile(model, backend="eager")])
def test_a_lenient_and_a_partial_load_of_a_patched_model(tmp_path: Path, wrap: Any) -> None:
    model, saved = wrap(Net()), Net()
    _patch_model_state_dict(model)
    dcp.save({"model": nn.ModuleDict(dict(saved.named_children())), "more": 1}, tmp_path / "ck")  # without the buffer
    for options in ({"strict": False}, {"partial": dcp.PartialLoad(include="model.*.weight")}):
        nn.init.zeros_(model.inp.weight)
        dcp.load({"model": model}, tmp_path / "ck", **options)
        assert torch.equal(model.inp.weight, saved.inp.weight)


def test_optimizers_that_were_patched_together_are_saved_together(tmp_path: Path) -> None:
    def both(seed: int) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        torch.manual_seed(seed)
        model = Net()
        optimizers = [torch.optim.Adam(part.parameters()) for part in (model.inp, model.block)]
        for optimizer in optimizers:
            train(model, optimizer, 1)
        _patch_optimizer_state_dict(model, optimizers=optimizers)
        return model, optimizers

    (saved, first), (loaded, second) = both(0), both(1)
    with pytest.raises(dcp.CheckpointMismatch, match="'optim' together with 1 more, which the state lacks"):
        dcp.save({"model": saved, "optim": first[0]}, tmp_path / "ck")
    dcp.save({"model": saved, "one": first[0], "two": first[1]}, tmp_path / "ck")
    dcp.load({"model": loaded, "one": second[0], "two": second[1]}, tmp_path / "ck")
    for mine, theirs in zip(second, first, strict=True):
        for here, there in zip(mine.state.values(), theirs.state.values(), strict=True):
            assert_same(here, there)
