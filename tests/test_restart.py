"""A run starts from its own newest checkpoint, else from a pre-trained one, else from scratch; never from less than
it should without a word."""

from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dcp_plugin as dcp
from tests import launch
from tests.compare import assert_same
from tests.layouts import build, train, whole_state


def _run(seed: int) -> dict[str, Any]:
    model, optimizer = build("plain", seed)
    return {"model": model, "optim": optimizer, "step": 0}


def _whole(state: dict[str, Any]) -> dict[str, Any]:
    return whole_state(state["model"], state["optim"])


@pytest.fixture
def pretrained(tmp_path: Path) -> Path:
    state = _run(seed=1)
    train(state["model"], state["optim"], 2)
    dcp.save({**state, "step": 900}, tmp_path / "pretrained", step=900)
    return tmp_path / "pretrained"


def test_one_call_starts_every_life_of_a_run(tmp_path: Path, pretrained: Path) -> None:
    root = tmp_path / "run"

    first = _run(seed=2)
    start = dcp.resume_or_init(first, root, init_from=pretrained)
    assert (start.how, start.path, start.step) == ("warm-started", pretrained, None)
    assert re.fullmatch(f"warm-started: loaded [0-9]+ items from {pretrained}", str(start))
    weights = _run(seed=3)
    dcp.load({"model": weights["model"]}, pretrained)
    assert_same(first["model"].state_dict(), weights["model"].state_dict())
    assert not first["optim"].state, "the optimizer is a new run's"
    assert first["optim"].param_groups[0]["lr"] == 0.01 * 3
    assert first["step"] == 0

    train(first["model"], first["optim"], 1)
    first["step"] = 1
    dcp.save(first, root / "step-1", step=1)
    shutil.rmtree(pretrained)
    second = _run(seed=4)
    start = dcp.resume_or_init(second, root, init_from=pretrained, partial=dcp.PartialLoad(include="no.such.key"))
    assert (start.how, start.path, start.step) == ("resumed", root / "step-1", 1)
    assert re.fullmatch(f"resumed at step 1: loaded [0-9]+ items from {root}/step-1", str(start))
    assert second["step"] == 1
    assert_same(_whole(first), _whole(second))


def test_with_nothing_to_start_from_a_run_starts_fresh(tmp_path: Path) -> None:
    state = _run(seed=1)
    before = _whole(state)
    start = dcp.resume_or_init(state, tmp_path / "run")
    assert (start.how, start.path, start.report) == ("fresh", None, None)
    assert "fresh" in str(start)
    assert_same(before, _whole(state))


def test_a_missing_init_from_is_an_error_when_it_is_needed(tmp_path: Path) -> None:
    with pytest.raises(dcp.CheckpointNotFound, match=r"init_from=.*typo"):
        dcp.resume_or_init(_run(1), tmp_path / "run", init_from=tmp_path / "typo")
    with pytest.raises(dcp.CheckpointNotFound, match="resume=must"):
        dcp.resume_or_init(_run(1), tmp_path / "run", resume="must", init_from=tmp_path / "typo")


def test_never_starts_again_from_the_pretrained_one(tmp_path: Path, pretrained: Path) -> None:
    dcp.save(_run(5), tmp_path / "run" / "step-1", step=1)
    start = dcp.resume_or_init(_run(2), tmp_path / "run", resume="never", init_from=pretrained)
    assert start.path == pretrained
    start = dcp.resume_or_init(_run(2), tmp_path / "run", resume=pretrained)
    assert (start.how, start.step) == ("resumed", 900)


def test_a_run_that_cannot_be_resumed_is_not_started_from_something_else(tmp_path: Path, pretrained: Path) -> None:
    """Neither if its checkpoints are damaged, nor if the newest does not fit."""
    own = tmp_path / "run" / "step-1"
    dcp.save(_run(5), own, step=1)
    other = nn.ModuleDict({"net": build("plain")[0], "adapter": nn.Linear(2, 2)})
    with pytest.raises(dcp.CheckpointMismatch, match=r"(?s)adapter.*strict=False"):
        dcp.resume_or_init({"model": other}, tmp_path / "run", init_from=pretrained)

    data = next(own.glob("__0_0-*.distcp"))
    data.write_bytes(data.read_bytes()[:-1])
    state = _run(2)
    before = _whole(state)
    with pytest.raises(dcp.CheckpointCorrupt, match=r"none that can be loaded: .*step-1.*truncated.*resume=never"):
        dcp.resume_or_init(state, tmp_path / "run", init_from=pretrained)
    assert_same(before, _whole(state))
    (own / "dcp_plugin.json").write_text("{")
    with pytest.raises(dcp.CheckpointCorrupt, match="none that can be loaded"):
        dcp.resolve_resume("auto", tmp_path / "run")


def test_a_run_that_was_killed_in_its_first_save_starts_again_from_the_pretrained_one(
    tmp_path: Path, pretrained: Path
) -> None:
    outcomes = launch.outcomes_of(_die_saving, 1, tmp_path / "run" / "step-1")
    assert outcomes[0].exit_code == -signal.SIGKILL
    assert [state.committed for state in dcp.list_checkpoints(tmp_path / "run")] == [False]
    assert dcp.resume_or_init(_run(2), tmp_path / "run", init_from=pretrained).how == "warm-started"


def _die_saving(path: Path) -> None:
    import os

    dcp.events.subscribe(lambda event: os.kill(os.getpid(), signal.SIGKILL))
    dcp.save(_run(5), path)


def test_only_modules_are_warm_started_wherever_they_are_in_the_state(tmp_path: Path) -> None:
    def state(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        return {"nets": {"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "ema": torch.zeros(1)}, "step": seed}

    pretrained = state(1)
    dcp.save(pretrained, tmp_path / "pretrained")
    fresh = state(2)
    dcp.resume_or_init(fresh, tmp_path / "run", init_from=tmp_path / "pretrained")
    for name in "ab":
        assert_same(fresh["nets"][name].state_dict(), pretrained["nets"][name].state_dict())
    assert fresh["step"] == 2


def test_a_partial_load_of_nothing_is_refused_also_where_it_would_not_be_needed(tmp_path: Path) -> None:
    dcp.save(_run(5), tmp_path / "run" / "step-1")
    for root in (tmp_path / "run", tmp_path / "fresh"):
        with pytest.raises(ValueError, match=r"init_from=PATH, or take partial out\. A resumed run takes everything"):
            dcp.resume_or_init(_run(2), root, partial=dcp.PartialLoad(include="model.*"))


def test_a_given_checkpointer_has_its_own_settings(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="checkpointer"):
        dcp.resume_or_init({}, tmp_path, checkpointer=dcp.Checkpointer(), timeout=3.0)


# Ranks


def test_ranks_do_what_rank_0_has_seen_and_fail_together(tmp_path: Path) -> None:
    dcp.save(_run(1), tmp_path / "pretrained")
    launch.run(_ranks_that_see_different_things, 2, tmp_path)


def _ranks_that_see_different_things(root: Path) -> None:
    """As on a shared file system whose directories are cached: one rank sees a checkpoint, the other does not."""
    rank = dist.get_rank()
    model, optimizer = build("fsdp2", seed=3)
    checkpointer = dcp.Checkpointer(timeout=20.0)
    state = {"model": model, "optim": optimizer}
    with_one, without = root / "run", root / "empty"
    checkpointer.save(state, with_one / "step-1", step=1)

    start = dcp.resume_or_init(
        state, without if rank else with_one, init_from=root / "pretrained", checkpointer=checkpointer
    )
    assert (start.how, start.step) == ("resumed", 1)
    start = dcp.resume_or_init(
        state, with_one if rank else without, init_from=root / "pretrained", checkpointer=checkpointer
    )
    assert start.how == "warm-started"
    with pytest.raises(dcp.CheckpointNotFound, match="init_from"):
        dcp.resume_or_init(state, without, init_from=root / f"typo-{rank}", checkpointer=checkpointer)
    checkpointer.close()


def test_what_was_on_the_meta_device_and_is_not_filled_is_named(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    dcp.save({"model": nn.Sequential(nn.Linear(2, 2))}, tmp_path / "pretrained")
    first = dcp.PartialLoad(include="model.0.*")
    with pytest.warns(UserWarning, match=r"model\.1\.weight, model\.1\.bias, which had been on the meta device"):
        dcp.resume_or_init({"model": model}, tmp_path / "run", init_from=tmp_path / "pretrained", partial=first)


def test_a_file_of_another_tool_is_something_to_start_from(tmp_path: Path) -> None:
    pretrained, fresh = _run(seed=1)["model"], _run(seed=2)
    torch.save(pretrained.state_dict(), tmp_path / "weights.pt")
    start = dcp.resume_or_init(fresh, tmp_path / "run", init_from=tmp_path / "weights.pt")
    assert start.how == "warm-started"
    assert_same(fresh["model"].state_dict(), pretrained.state_dict())
