"""``attach(fabric).resume_or_init``: ``fabric.load`` of the run's own checkpoint, else the weights of another's."""

from __future__ import annotations

import pytest
import torch

import dcp_plugin as dcp
from dcp_plugin.core.paths import Where
from dcp_plugin.core.runs import deletion
from tests.compare import assert_same
from tests.launch import on_ranks
from tests.training import WORLD_SIZE


@pytest.mark.one_of("world_size")
@on_ranks(1, 2)
def test_a_run_starts_with_the_weights_of_init_from_or_its_own_checkpoint(place: Where, world_size: int) -> None:
    from dcp_plugin.fabric import Attachment, attach
    from tests.fabric import training as t

    layouts = [name for name in WORLD_SIZE if WORLD_SIZE[name] == world_size]
    torch.manual_seed(3)
    pretrained = t.Net()
    for layout in layouts:
        dcp.save({"model": pretrained}, place / "pretrained")
        fabric = t.fabric_for(layout)
        attached, run = attach(fabric), t.Training(fabric, seed=5)
        body = dcp.PartialLoad(include="net.body.*", rename={"net.": "model."})
        start = attached.resume_or_init(run.state, place / layout, init_from=place / "pretrained", partial=body)
        assert (start.how, start.path) == ("warm-started", place / "pretrained"), layout
        torch.manual_seed(5)
        taken = {f"body.{key}": value for key, value in pretrained.body.state_dict().items()}
        expected = {f"model.{key}": value for key, value in {**t.Net().state_dict(), **taken}.items()}
        assert_same({key: value for key, value in run.whole_state().items() if key in expected}, expected)

        run.run(until=2)
        fabric.save(place / layout / "step", run.state)
        saved = run.whole_state()
        if fabric.global_rank == 0:  # which looks for it
            deletion.remove(place / "pretrained")
        fabric = t.fabric_for(layout)
        attached, run = attach(fabric), t.Training(fabric, seed=6)
        start = attached.resume_or_init(run.state, place / layout, init_from=place / "pretrained")
        assert (start.how, start.path) == ("resumed", place / layout / "step")
        assert_same(run.whole_state(), saved)
        with pytest.raises(dcp.CheckpointError, match="attach"):
            Attachment(fabric.strategy, None).resume_or_init({}, place)
        with pytest.raises(ValueError, match="init_from=PATH"):
            attached.resume_or_init(run.state, place / layout, partial=body)
