"""A callback that has something in its state on one rank: an average that one rank keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.compare import same_tree
from tests.launch import on_ranks
from tests.lightning import TRUSTED
from tests.messages import warned


def _average(number: int) -> dict[str, Any]:
    return {"w": torch.full((3,), float(number)), "n": number}


@pytest.mark.one_of("elsewhere")
@pytest.mark.parametrize("elsewhere", [{}, None, "no callback"], ids=["empty", "None", "no callback"])
@pytest.mark.parametrize(("owner", "stock"), [(0, False), (0, True), (1, False)])
@on_ranks(2)
def test_an_average_of_one_rank_comes_back_in_both_generations(
    tmp_path: Path, owner: int, stock: bool, elsewhere: Any
) -> None:
    """Every rank that has the callback gets it, as Lightning's ``_call_callbacks_load_state_dict`` hands rank 0's state
    to every rank (``stock``)."""
    from tests.lightning import training as t

    rank = dist.get_rank()

    class Average(t.Callback):
        def __init__(self, number: int) -> None:
            self.shadow = _average(number) if rank == owner else elsewhere

        def state_dict(self) -> dict[str, Any]:
            return {"shadow": self.shadow}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.shadow = state_dict["shadow"]

    def fit(average: Average, steps: int, path: Path | None = None) -> Any:
        has_callback = rank == owner or elsewhere != "no callback"
        trainer = t.trainer_for(
            "ddp", [average] if has_callback else [], plugin=not stock, stock=stock, max_steps=steps
        )
        trainer.fit(t.Model("ddp"), t.plain_loader("ddp"), ckpt_path=path, **TRUSTED)
        assert not path or not has_callback or same_tree(average.shadow, _average(int(path.stem)))
        return trainer

    average = Average(7)
    fit(average, 1).save_checkpoint(tmp_path / "7.ckpt")
    again = Average(0)
    trainer = fit(again, 2, tmp_path / "7.ckpt")
    if rank == owner:
        again.shadow = _average(8)
    trainer.save_checkpoint(tmp_path / "8.ckpt")
    fit(Average(0), 3, tmp_path / "8.ckpt")


@on_ranks(2)
def test_callback_state_that_differs_is_named_once_and_copies_of_buffers_are_not(tmp_path: Path) -> None:
    from tests.lightning import training as t

    rank, module = dist.get_rank(), t.Model("ddp")

    class Average(t.Callback):
        def state_dict(self) -> dict[str, Any]:
            buffers = {f"shadow.{name}": torch.full((3,), rank) for name, _ in module.named_buffers()}
            return {"recent": torch.full((3,), rank), "loss": float(rank), **buffers}

    assert any(True for _ in module.buffers())
    trainer = t.trainer_for("ddp", [Average()], plugin=True, max_steps=1)
    with warned("ranks have different values") as messages:
        trainer.fit(module, t.plain_loader("ddp"))
        for name in ("1", "2"):
            trainer.save_checkpoint(tmp_path / name)
    assert len(messages) == (rank == 0)
    assert all("Average.recent (ranks 0 and 1). " in message for message in messages)
