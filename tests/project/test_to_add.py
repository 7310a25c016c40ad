"""The rows of CONTRIBUTING's "to add", each tried with a toy that is added as the row says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dcp_plugin as dcp
from dcp_plugin.core.paths import Where
from dcp_plugin.integration import BaseAttachment
from dcp_plugin.integration.stored import EXTRA, MODEL, OPTIM
from tests.compare import same_bytes


class Trainer:
    """The toy framework: a loop over random batches."""

    def __init__(self) -> None:
        self.model = nn.Linear(4, 4)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.counters = {"step": 0}

    def fit(self, steps: int) -> None:
        for _ in range(steps):
            self.model(torch.randn(2, 4)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.counters["step"] += 1


class Attachment(BaseAttachment):
    """Integration of the toy framework: the world size, an end, and the names of the state."""

    world_size = 1

    def __init__(self, trainer: Trainer, **overrides: Any) -> None:
        super().__init__(dcp.CheckpointConfig(**overrides))
        self.trainer = trainer

    def detach(self) -> None:
        self.close()

    def state(self) -> dict[str, Any]:
        trainer = self.trainer
        loop = {"counters": trainer.counters, "streams": dcp.RandomStreams()}
        return {MODEL: trainer.model, OPTIM: trainer.optimizer, EXTRA: loop}

    def save(self, path: Path) -> None:
        self.checkpointer.save(self.state(), self.where(path), step=self.trainer.counters["step"])

    def load(self, path: Path) -> None:
        self.checkpointer.load(self.state(), self.where(path))


def test_a_framework_continues_a_training_in_the_background_save_of_another(tmp_path: Path) -> None:
    with Attachment(Trainer(), async_save=True) as first:
        first.trainer.fit(2)
        first.save(tmp_path / "step-2")
        first.trainer.fit(2)
    with Attachment(Trainer()) as second:
        second.load(tmp_path / "step-2")
        assert second.trainer.counters == {"step": 2}
        second.trainer.fit(2)
    assert same_bytes(first.trainer.model.weight, second.trainer.model.weight)
    assert dcp.load({MODEL: nn.Linear(4, 4)}, tmp_path / "step-2").loaded == ["model.weight", "model.bias"]


class Int4(torch.Tensor):
    """The toy quantized dtype: two numbers of four bits in a byte, and a scale for each row."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Int4:
        shape = (codes.shape[0], 2 * codes.shape[1])
        made: Any = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32, device=codes.device)
        made.codes, made.scale = codes, scale
        return made  # type: ignore[no-any-return]

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None: ...

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: Any, context: None, size: Any, stride: Any) -> Int4:
        return cls(parts["codes"], parts["scale"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function is torch.ops.aten.detach.default
        return cls(args[0].codes, args[0].scale)


class Quantized(nn.Module):
    """A layer with a weight of four bits, and one of float8."""

    def __init__(self, number: int) -> None:
        super().__init__()
        codes, scale = torch.full((4, 2), number, dtype=torch.uint8), torch.full((4,), number / 2)
        self.weight = nn.Parameter(Int4(codes, scale), requires_grad=False)
        self.float8 = nn.Parameter(torch.full((4,), number).to(torch.float8_e4m3fn), requires_grad=False)


def test_a_quantized_dtype_comes_back_from_the_device_and_the_host_copy(tmp_path: Path) -> None:
    with dcp.Checkpointer(async_save=True) as checkpointer:
        dcp.save({"model": Quantized(3)}, tmp_path / "step-1")
        checkpointer.save({"model": Quantized(3)}, tmp_path / "step-2")
    for name in ("step-1", "step-2"):
        model = Quantized(5)
        dcp.load({"model": model}, tmp_path / name)
        weight: Any = model.weight
        assert weight.codes.tolist() == [[3, 3]] * 4 and weight.scale.tolist() == [1.5] * 4
        assert model.float8.float().tolist() == [3.0] * 4


@dataclass(frozen=True)
class Pinning(dcp.Retention):
    """The toy rule: checkpoints of these names stay."""

    names: tuple[str, ...] | None = None

    def reasons(self, checkpoints: Sequence[Any]) -> dict[Where, list[str]]:
        why = super().reasons(checkpoints)
        for path in why:
            if path.name in (self.names or ()):
                why[path].append("pinned")
        return why


def test_a_retention_rule_decides_what_each_save_deletes(tmp_path: Path) -> None:
    rule = Pinning(newest=1, names=("step-2",))
    for step in range(1, 5):
        dcp.save({"n": step}, tmp_path / f"step-{step}", step=step, keep_last=rule)
    left = dcp.list_checkpoints(tmp_path)
    assert [state.path.name for state in left] == ["step-2", "step-4"]
    assert rule.reasons(left)[tmp_path / "step-2"] == ["pinned"]
