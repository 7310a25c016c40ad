"""Values that a module adds to its state dict, as the layers of bitsandbytes add the state of their quantization.

The stand-ins have the methods of bitsandbytes 0.50 that matter: a 4-bit layer saves its state and has no code to load
it, and an 8-bit layer refuses a load after its first forward pass.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dcp_plugin as dcp


class QuantState:
    """State of which ``absmax`` is a tensor, and the offset a number that is packed for the state dict."""

    def __init__(self, absmax: torch.Tensor, offset: float) -> None:
        self.absmax, self.offset = absmax, offset

    @classmethod
    def from_dict(cls, tensors: dict[str, torch.Tensor], device: torch.device) -> QuantState:
        return cls(tensors["absmax"].to(device), float(tensors["quant_state.packed"]))


class Linear4bit(nn.Module):
    __module__ = "bitsandbytes.nn.modules"

    def __init__(self, offset: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 1), int(offset), dtype=torch.uint8), requires_grad=False)
        self.weight.quant_state = self.quant_state = QuantState(torch.full((2,), offset), offset)  # type: ignore[attr-defined]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.absmax"] = self.quant_state.absmax
        destination[f"{prefix}weight.quant_state.packed"] = torch.tensor(self.quant_state.offset)


class Linear8bit(nn.Linear):
    __module__ = "bitsandbytes.nn.modules"

    def _load_from_state_dict(self, *args: Any) -> None:
        raise RuntimeError("Loading a quantized checkpoint into non-quantized Linear8bitLt is not supported")


class Adding(nn.Module):
    """A module whose state dict has a tensor that follows from its weight, and one that does not."""

    def __init__(self, value: float, adds: str) -> None:
        super().__init__()
        self.weight, self.value, self.adds = nn.Parameter(torch.full((2,), value)), value, adds
        self.register_state_dict_post_hook(Adding._add)

    def _add(self, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state[f"{prefix}added"] = self.weight.detach() * 2 if self.adds == "derived" else torch.tensor([self.value])


def test_all_of_the_quantization_state_is_restored(tmp_path: Path) -> None:
    dcp.save({"model": nn.Sequential(Linear4bit(3.0))}, tmp_path / "c")
    layer = Linear4bit(5.0)
    report = dcp.load({"model": nn.Sequential(layer)}, tmp_path / "c")
    assert not report.unexpected
    assert layer.weight.quant_state is layer.quant_state
    assert (layer.weight[0].item(), layer.quant_state.offset, layer.quant_state.absmax.tolist()) == (3, 3.0, [3.0, 3.0])


def test_a_layer_that_takes_no_quantized_weight_is_named(tmp_path: Path) -> None:
    dcp.save({"model": nn.Sequential(nn.Linear(2, 2))}, tmp_path / "c")
    with pytest.raises(
        dcp.CheckpointMismatch, match=r"0\.weight is a quantized weight of bitsandbytes, which the layer"
    ):
        dcp.load({"model": nn.Sequential(Linear8bit(2, 2))}, tmp_path / "c")


def test_a_value_that_no_code_takes_is_unexpected_as_in_torch(tmp_path: Path) -> None:
    saved, target = Adding(1.0, "own"), Adding(2.0, "own")
    with pytest.raises(RuntimeError, match="Unexpected key"):
        target.load_state_dict(saved.state_dict())
    dcp.save({"model": saved}, tmp_path / "c")
    with pytest.raises(dcp.CheckpointMismatch, match=r"model\.added: unexpected after the load hooks"):
        dcp.load({"model": target}, tmp_path / "c")


def test_a_value_that_follows_from_loaded_ones_is_no_error(tmp_path: Path) -> None:
    dcp.save({"model": Adding(1.0, "derived")}, tmp_path / "c")
    target = Adding(2.0, "derived")
    assert not dcp.load({"model": target}, tmp_path / "c").unexpected
    assert target.state_dict()["added"].tolist() == [2.0, 2.0]
