"""An object that is registered on all ranks, and has something on one of them: an average that one rank keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.compare import same_tree
from tests.launch import on_ranks
from tests.messages import warned
from tests.objects import Holder


def _average(number: int) -> dict[str, Any]:
    return {"w": torch.full((3,), float(number)), "n": number}


@pytest.mark.one_of("native")
@pytest.mark.parametrize("elsewhere", [{}, None], ids=["empty", "None"])
@pytest.mark.parametrize(("owner", "native"), [(0, False), (0, True), (1, False)])
@on_ranks(2)
def test_an_average_of_one_rank_comes_back_in_both_generations(
    tmp_path: Path, owner: int, native: bool, elsewhere: Any
) -> None:
    """Every rank gets it, as Accelerate's ``load_custom_state`` hands rank 0's object to every rank (``native``)."""
    from tests.accelerate import training as t

    def begin(number: int) -> tuple[Any, Holder]:
        run = t.start("ddp", native=native, stateful=False, unused=False)
        average = Holder({"shadow": _average(number) if dist.get_rank() == owner else elsewhere})
        run.accelerator.register_for_checkpointing(average)
        return run.accelerator, average

    for number in (7, 8):
        accelerator, average = begin(7)
        if number == 8:
            accelerator.load_state(str(tmp_path / "7"))
            assert same_tree(average.state, {"shadow": _average(7)})
            if dist.get_rank() == owner:
                average.state = {"shadow": _average(8)}
        with warned("differ") as messages:
            accelerator.save_state(str(tmp_path / str(number)))
        assert messages == []
        accelerator, average = begin(0)
        accelerator.load_state(str(tmp_path / str(number)))
        assert same_tree(average.state, {"shadow": _average(number)})


@on_ranks(2)
def test_registered_state_that_differs_is_named_once(tmp_path: Path) -> None:
    from tests.accelerate import training as t

    accelerator, rank = t.start("ddp", stateful=False, unused=False).accelerator, dist.get_rank()
    accelerator.register_for_checkpointing(Holder({"recent": torch.full((3,), rank), "loss": float(rank)}))
    with warned("ranks have different values") as messages:
        for name in ("1", "2"):
            accelerator.save_state(str(tmp_path / name))
    assert len(messages) == (rank == 0)
    assert all("key: extra.registered.0.recent (ranks 0 and 1). " in message for message in messages)
