"""The comparison of the live state with what a resume has loaded, in a plain loop."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import dcp_plugin as dcp
from dcp_plugin.tools.resume_check import marks_of
from tests.damage import flip
from tests.launch import on_ranks
from tests.messages import refusal, warned


def state() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return {"model": model, "optim": optimizer, "sched": schedule, "step": 0, "rng": dcp.RandomStreams()}


def trained(root: Path, **more: Any) -> dict[str, Any]:
    """Train for two steps, save, and return another state that has resumed from the save."""
    before = state() | more
    for _ in range(2):
        train_step(before)
    dcp.save(before, root / "step-2", step=2)
    return state() | more


def train_step(state: dict[str, Any]) -> None:
    state["model"](torch.randn(3, 4)).square().sum().backward()
    state["optim"].step()
    state["sched"].step()


def resumed(root: Path, **more: Any) -> dict[str, Any]:
    again = trained(root, **more)
    assert dcp.resume_or_init(again, root).report.exact  # type: ignore[union-attr]
    return again


def is_exact(state: dict[str, Any], **options: Any) -> bool | None:
    report = dcp.verify_resume(state, **options)
    assert report is not None
    return report.exact


def found(state: dict[str, Any], **options: Any) -> str:
    """The warning of a comparison that finds a difference."""
    with warned("NOT exact") as messages:
        assert is_exact(state, **options) is False
    (message,) = messages
    return message


def test_a_resume_is_exact_and_says_what_was_compared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dcp_plugin")
    again = trained(tmp_path)
    assert dcp.resume_or_init(again, tmp_path).report.exact  # type: ignore[union-attr]
    assert caplog.messages[-1].startswith("Resume is exact: ") and caplog.messages[-1].endswith(
        "at the end of the load"
    )
    assert is_exact(again)
    assert caplog.messages[-1].endswith("before the first step")


def test_a_plain_load_is_no_resume(tmp_path: Path) -> None:
    again = trained(tmp_path)
    assert dcp.load(again, tmp_path / "step-2").exact is None
    assert dcp.resume_or_init(again, tmp_path, verify_resume=False).report.exact is None  # type: ignore[union-attr]


def test_a_schedule_stepped_once_more_is_shifted_with_its_rates(tmp_path: Path) -> None:
    again = resumed(tmp_path)
    again["sched"].step()
    message = found(again)
    assert "stepped once more after the restore: sched.last_epoch" in message
    assert "optim.param_groups.0.weight.lr" in message and "overwritten" not in message


def test_an_optimizer_made_anew_is_reinitialised(tmp_path: Path) -> None:
    again = resumed(tmp_path)
    again["optim"] = torch.optim.AdamW(again["model"].parameters())
    assert "reinitialised after the restore: optim." in found(again)


def test_weights_initialised_after_the_load_are_overwritten(tmp_path: Path) -> None:
    again = resumed(tmp_path)
    again["model"][0].reset_parameters()
    assert "overwritten after the restore: model.0.weight, model.0.bias" in found(again)


def test_a_large_tensor_is_compared_by_a_sample(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dcp_plugin")
    dcp.save({"model": nn.Linear(1000, 1000)}, tmp_path / "step-1")
    again = {"model": nn.Linear(1000, 1000)}
    dcp.resume_or_init(again, tmp_path)
    assert any("2 of 2 values, 2 % of their bytes" in message for message in caplog.messages)
    with torch.no_grad():
        again["model"].weight.mul_(2)
    assert "model.weight" in found(again)


class Average:
    """An average of weights whose author forgot to take the loaded one, or scales it when it is loaded."""

    def __init__(self, takes: float) -> None:
        self.shadow, self.takes, self.decay = torch.randn(3), takes, 0.9

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow.clone(), "decay": self.decay}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.takes:
            self.shadow, self.decay = state["shadow"] * self.takes, 0.5


def test_without_checksums_a_resume_refers_to_the_bytes_that_it_read(tmp_path: Path) -> None:
    again = trained(tmp_path)
    flip(tmp_path / "step-2", "model.0.weight")
    dcp.resume_or_init(again, tmp_path, io={"verify": False})
    assert is_exact(again)
    again["model"][0].weight.data[0] += 1
    assert "overwritten after the restore: model.0.weight" in found(again)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.complex64, torch.bool])
@pytest.mark.parametrize("shape", [(), (3, 5), (256, 256), (0, 2)])
def test_what_a_load_has_checked_is_what_the_live_tensor_has(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    dcp.save({"x": torch.ones(shape, dtype=dtype), "step": 1}, tmp_path / "step-1")
    again = {"x": torch.zeros(shape, dtype=dtype), "step": 0}
    dcp.resume_or_init(again, tmp_path)
    assert is_exact(again)
    again["x"] = torch.zeros(shape, dtype=dtype)
    assert not again["x"].numel() or "after the restore: x" in found(again)


def test_an_object_that_ignores_its_state_is_not_restored(tmp_path: Path) -> None:
    dcp.save({"ema": Average(1)}, tmp_path / "step-1")
    with warned("not restored: ema.shadow") as messages:
        assert dcp.resume_or_init({"ema": Average(0)}, tmp_path).report.exact is False  # type: ignore[union-attr]
    assert len(messages) == 1


def test_an_object_may_transform_a_part_of_its_state(tmp_path: Path) -> None:
    dcp.save({"ema": Average(1), "n": 1}, tmp_path / "step-1")
    again = {"ema": Average(1), "n": 0}
    assert dcp.resume_or_init(again, tmp_path).report.exact  # type: ignore[union-attr]
    assert is_exact(again)


def test_buffers_and_random_numbers_may_change_before_the_first_step(tmp_path: Path) -> None:
    again = resumed(tmp_path)
    again["model"](torch.randn(3, 4))
    assert is_exact(again)


def test_a_tensor_of_another_dtype_is_not_compared(tmp_path: Path) -> None:
    again = resumed(tmp_path)
    again["model"][0].to(torch.bfloat16)
    assert is_exact(again)


def test_a_move_to_a_device_is_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    again = resumed(tmp_path, large=torch.randn(300, 300))
    monkeypatch.setattr("dcp_plugin.tools.resume_check.is_plain_memory", lambda tensor: False)  # as on a device
    assert is_exact(again)


def test_a_tensor_with_another_order_in_memory_is_not_compared(tmp_path: Path) -> None:
    again = {"model": nn.Conv2d(3, 4, 3)}
    dcp.save(again, tmp_path / "step-1")
    dcp.resume_or_init(again, tmp_path)
    again["model"].to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    assert is_exact(again)


def test_a_tensor_without_memory_has_no_mark() -> None:
    assert not marks_of({"w": torch.empty(2, device="meta")})


def test_an_object_may_load_another_checkpoint_meanwhile(tmp_path: Path) -> None:
    class Teacher(Average):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict(state)
            dcp.load({"model": nn.Linear(2, 2)}, tmp_path / "teacher")

    dcp.save({"model": nn.Linear(2, 2)}, tmp_path / "teacher")
    dcp.save({"model": nn.Linear(2, 2), "teacher": Teacher(1)}, tmp_path / "run" / "step-1")
    again = {"model": nn.Linear(2, 2), "teacher": Teacher(1)}
    assert dcp.resume_or_init(again, tmp_path / "run").report.exact  # type: ignore[union-attr]
    assert is_exact(again)


@pytest.mark.parametrize("globs", [["lr"], "optim.param_groups.*.lr"])
def test_what_changes_on_purpose_can_be_named(tmp_path: Path, globs: Any) -> None:
    again = resumed(tmp_path)
    for group in again["optim"].param_groups:
        group["lr"] = 7.0
    assert "optim.param_groups" in found(again)
    assert is_exact(again, expect_changed=globs)


def test_missing_keys_that_the_caller_allows_are_not_exact_and_warn_of_nothing_twice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dcp_plugin")
    dcp.save({"model": nn.Linear(2, 2)}, tmp_path / "step-1")
    state = {"model": nn.Linear(2, 2), "more": {"a": 1}}
    start = dcp.resume_or_init(state, tmp_path, strict=False)
    assert start.report is not None and start.report.exact is False
    assert "not restored: more" in caplog.messages[-1]
    with pytest.raises(dcp.CheckpointMismatch, match="not restored: more"):
        dcp.resume_or_init(state, tmp_path, strict=False, verify_resume="error")


def test_a_fresh_start_has_nothing_to_compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dcp_plugin.tools.resume_check.latest", None)
    assert dcp.resume_or_init({"n": 1}, tmp_path).how == "fresh"
    assert dcp.verify_resume({"n": 1}) is None


def test_an_object_that_the_resume_has_not_loaded_is_not_exact(tmp_path: Path) -> None:
    again = trained(tmp_path)
    optimizer = again.pop("optim")
    start = dcp.resume_or_init(again, tmp_path)
    assert start.report is not None and start.report.exact is None
    assert "not restored: optim" in found(again | {"optim": optimizer})


def test_an_unknown_mode_is_refused(tmp_path: Path) -> None:
    dcp.save({"n": 1}, tmp_path / "step-1")
    wrong: Any = "warn"
    with pytest.raises(ValueError, match="'warn'"):
        dcp.resume_or_init({"n": 1}, tmp_path, verify_resume=wrong)


class Unreadable(Average):
    reads = 0

    def state_dict(self) -> dict[str, Any]:
        self.reads += 1
        if self.reads > 1:
            raise RuntimeError("state_dict() failed")
        return super().state_dict()


def test_a_state_that_cannot_be_read_again_does_not_fail_the_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dcp_plugin")
    dcp.save({"ema": Average(1)}, tmp_path / "step-1")
    assert dcp.resume_or_init({"ema": Unreadable(1)}, tmp_path).report.exact is None  # type: ignore[union-attr]
    (message,) = [text for text in caplog.messages if "Resume is not known to be exact" in text]
    assert "state_dict() failed" in message


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
@on_ranks(2)
def test_a_difference_on_one_rank_is_raised_on_all(tmp_path: Path, layout: str) -> None:
    from tests.layouts import build

    model, optimizer = build(layout)
    dcp.save({"model": model, "optim": optimizer}, tmp_path / "step-1")
    again = dict(zip(("model", "optim"), build(layout), strict=True))
    assert dcp.resume_or_init(again, tmp_path).report.exact  # type: ignore[union-attr]
    assert is_exact(again)
    if torch.distributed.get_rank() == 1:
        again["optim"].param_groups[0]["lr"] = 7.0
    message = refusal(dcp.CheckpointMismatch, lambda: dcp.verify_resume(again, on_difference="error"), "on 2 ranks")
    assert "rank 1: overwritten after the restore: optim.param_groups." in message


@on_ranks(2)
def test_an_error_that_one_rank_asks_for_is_raised_on_all(tmp_path: Path) -> None:
    rank = torch.distributed.get_rank()
    state = {"n": 3, "weights": torch.ones(2)}
    dcp.save(state, tmp_path / "step-1")
    dcp.resume_or_init(state, tmp_path)
    state["weights"].fill_(rank)  # rank 0 alone differs
    refusal(dcp.CheckpointMismatch, lambda: dcp.verify_resume(state, on_difference=("auto", "error")[rank]), "weights")


@on_ranks(2)
def test_ranks_that_compare_and_ranks_that_do_not_are_refused(tmp_path: Path) -> None:
    state = {"n": 3}
    dcp.save(state, tmp_path / "step-1")
    mode: Any = ("auto", False)[torch.distributed.get_rank()]
    resume = lambda: dcp.resume_or_init(state, tmp_path, verify_resume=mode)  # noqa: E731
    refusal(dcp.CheckpointMismatch, resume, "rank 0 and rank 1", "verify_resume='auto' and False")


@on_ranks(2)
def test_a_mode_that_one_rank_misspells_is_refused_on_all(tmp_path: Path) -> None:
    dcp.save({"n": 3}, tmp_path / "step-1")
    dcp.resume_or_init(state := {"n": 0}, tmp_path)
    mode: Any = ("auto", "warn")[torch.distributed.get_rank()]
    refusal(dcp.CheckpointError, lambda: dcp.verify_resume(state, on_difference=mode), "rank 1", "'warn'")


@on_ranks(2)
def test_a_state_that_one_rank_does_not_have_is_refused_on_all(tmp_path: Path) -> None:
    dcp.save({"n": 3}, tmp_path / "step-1")
    dcp.resume_or_init(state := {"n": 0}, tmp_path)
    here: Any = (state, None)[torch.distributed.get_rank()]
    refusal(dcp.CheckpointError, lambda: dcp.verify_resume(here), "rank 1", "TypeError")


@on_ranks(2)
def test_an_object_of_one_rank_beside_fsdp1_does_not_hang(tmp_path: Path) -> None:
    from tests.layouts import build, train

    state: dict[str, Any] = dict(zip(("model", "optim"), build("fsdp1"), strict=True))
    train(*state.values())
    if torch.distributed.get_rank() == 0:
        state["ema"] = Average(1)
    dcp.save(state, tmp_path / "step-1")
    again = {name: Average(1) if name == "ema" else value for name, value in state.items()}
    assert dcp.resume_or_init(again, tmp_path).report.exact is not False  # type: ignore[union-attr]


def test_a_pruned_weight_is_not_compared(tmp_path: Path) -> None:
    again = resumed(tmp_path)
    prune.random_unstructured(again["model"][0], "weight", 0.5)
    assert is_exact({"model": again["model"]})
