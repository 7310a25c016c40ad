"""Checkpoints of what trains alone: what a save leaves out, and what a load of them needs; keys that are left out on
purpose."""

from __future__ import annotations

import hashlib
import logging
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dcp_plugin as dcp
from dcp_plugin.checkpointer import Internals
from dcp_plugin.core.format import INDEX, index_file
from dcp_plugin.core.loading import loaded_parts, origins
from dcp_plugin.events import SaveFinished
from tests import launch
from tests.compare import assert_same, full_state
from tests.damage import flip_in_memory
from tests.finetune import Tuned, build, finished_saves, train
from tests.forge import change_summary
from tests.launch import gathered, on_ranks
from tests.places import names_in


@pytest.fixture(autouse=True)
def _has_loaded_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test is as in a process of its own."""
    monkeypatch.setattr(origins, "_loads", {})
    loaded_parts.clear()


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model, "optim": optimizer}


def _pretrained(path: Path) -> nn.Module:
    model, optimizer = build(seed=7)
    dcp.save(_state(model, optimizer), path)
    return model


def _tuned_on(base: Path, **options: Any) -> tuple[dcp.Checkpointer, nn.Module, torch.optim.Optimizer]:
    model, optimizer = build(seed=1)
    ours = dcp.Checkpointer(trainable_only=True, **options)
    ours.load(_state(model, optimizer), base)
    train(model, optimizer)
    return ours, model, optimizer


def _check(base: Path, path: Path, model: nn.Module, **options: Any) -> None:
    """Load the base, and the checkpoint over it."""
    other, fresh = build(seed=2)
    dcp.load({"model": other}, base, **options)
    dcp.load(_state(other, fresh), path)
    assert_same(full_state(other.state_dict()), full_state(model.state_dict()))


def _left_out(path: Path) -> int:
    return len(dcp.inspect(path).left_out)


def test_only_what_trains_is_written_and_the_base_is_loaded_before_it(
    tmp_path: Path, events: list[SaveFinished]
) -> None:
    _pretrained(tmp_path / "base")
    ours, model, optimizer = _tuned_on(tmp_path / "base")
    ours.save(_state(model, optimizer), tmp_path / "run" / "0")
    assert events[1].bytes <= 0.11 * events[0].bytes
    _check(tmp_path / "base", tmp_path / "run" / "0", model)
    info = dcp.inspect(tmp_path / "run" / "0")
    assert info.base == str(tmp_path / "base")
    assert len(info.left_out) == 16 and str(tmp_path / "base") in str(info)


def test_stock_torch_misses_what_is_left_out(tmp_path: Path) -> None:
    _pretrained(tmp_path / "base")
    ours, model, optimizer = _tuned_on(tmp_path / "base")
    ours.save(_state(model, optimizer), tmp_path / "run" / "0")
    head = {"model.head.weight": torch.zeros_like(model.get_parameter("head.weight"))}
    stock.load(head, checkpoint_id=tmp_path / "run" / "0")
    assert torch.equal(head["model.head.weight"], model.get_parameter("head.weight"))
    with pytest.raises(BaseException, match="Missing key"):
        stock.load({"model.backbone.0.weight": torch.zeros(256, 256)}, checkpoint_id=tmp_path / "run" / "0")


@pytest.mark.parametrize("async_save", [False, True], ids=["blocking", "in the background"])
def test_a_frozen_parameter_that_has_changed_by_one_bit_is_saved(
    tmp_path: Path, async_save: bool, caplog: pytest.LogCaptureFixture
) -> None:
    _pretrained(tmp_path / "base")
    ours, model, optimizer = _tuned_on(tmp_path / "base", async_save=async_save)
    flip_in_memory(model.get_parameter("backbone.3.weight"), 12_345)
    with caplog.at_level(logging.WARNING, "dcp_plugin"):
        for step in range(2):
            ours.save(_state(model, optimizer), tmp_path / "run" / str(step))
        ours.close()
    assert caplog.text.count("model.backbone.3.weight") == 1
    assert "model.backbone.3.weight" in {tensor.key for tensor in dcp.inspect(tmp_path / "run" / "1").tensors}
    _check(tmp_path / "base", tmp_path / "run" / "1", model)


def test_the_same_call_at_each_start_loads_the_base_first_and_leaves_it_out_again(
    tmp_path: Path, events: list[SaveFinished]
) -> None:
    _pretrained(tmp_path / "base")
    trained: nn.Module | None = None
    for step, how in enumerate(("warm-started", "resumed", "resumed")):
        model, optimizer = build(seed=step + 1)
        ours = dcp.Checkpointer(trainable_only=True, keep_last=1)
        start = dcp.resume_or_init(
            _state(model, optimizer), tmp_path / "run", init_from=tmp_path / "base", checkpointer=ours
        )
        assert start.how == how
        if trained is not None:
            assert_same(dict(model.state_dict()), dict(trained.state_dict()))
        train(model, optimizer)
        ours.save(_state(model, optimizer), tmp_path / "run" / f"step-{step}", step=step)
        assert events[-1].bytes <= 0.11 * events[0].bytes
        trained = model
    assert names_in(tmp_path / "run") == ["step-2"]
    assert _left_out(tmp_path / "run" / "step-2") == 16


@pytest.mark.parametrize("init_from", [None, "other"], ids=["without init_from", "with another one"])
def test_a_resume_that_has_not_loaded_the_base_is_refused_and_overwrites_nothing(
    tmp_path: Path, init_from: str | None
) -> None:
    _pretrained(tmp_path / "base")
    ours, model, optimizer = _tuned_on(tmp_path / "base")
    ours.save(_state(model, optimizer), tmp_path / "run" / "step-1")
    other, fresh = build(seed=9)
    dcp.save({"model": other}, tmp_path / "other")
    before = {key: value.clone() for key, value in other.state_dict().items()}
    options = {} if init_from is None else {"init_from": tmp_path / init_from}
    with pytest.raises(dcp.CheckpointMismatch, match=rf"model\.backbone\.0\.weight.*init_from='{tmp_path / 'base'}'"):
        dcp.resume_or_init(_state(other, fresh), tmp_path / "run", **options)
    for strict in (True, False):
        with pytest.raises(dcp.CheckpointMismatch, match="left out"):
            dcp.load(_state(other, fresh), tmp_path / "run" / "step-1", strict=strict)
    assert_same(dict(other.state_dict()), before)
    dcp.load(_state(other, fresh), tmp_path / "run" / "step-1", dcp.PartialLoad(exclude="*.backbone.*"))
    assert torch.equal(other.get_parameter("head.weight"), model.get_parameter("head.weight"))


def test_a_process_that_has_loaded_nothing_of_the_base_is_told_so(tmp_path: Path) -> None:
    _pretrained(tmp_path / "base")
    launch.run(_tune_and_save, 1, tmp_path)
    with pytest.raises(dcp.CheckpointMismatch, match=r"fingerprint \w{12}\): this process has not loaded that"):
        dcp.load({"model": build(seed=7)[0]}, tmp_path / "run" / "0")


def _tune_and_save(root: Path) -> None:
    ours, model, optimizer = _tuned_on(root / "base")
    ours.save(_state(model, optimizer), root / "run" / "0")


def test_a_base_that_was_loaded_into_another_model_is_not_loaded_here(tmp_path: Path) -> None:
    """As in a script that compares the pre-trained model with the tuned one."""
    _pretrained(tmp_path / "base")
    launch.run(_tune_and_save, 1, tmp_path)
    first, second = build(seed=3)[0], build(seed=4)[0]
    dcp.load({"model": first}, tmp_path / "base")
    before = {key: value.clone() for key, value in second.state_dict().items()}
    with pytest.raises(dcp.CheckpointMismatch, match="loaded that into other objects"):
        dcp.load({"model": second}, tmp_path / "run" / "0")
    assert_same(dict(second.state_dict()), before)
    larger = nn.ModuleDict({"net": first, "more": nn.Linear(2, 2)})
    only = dcp.PartialLoad(include="model.net.*", rename={"model.net.": "model."})
    dcp.load({"model": larger}, tmp_path / "run" / "0", only)


def test_a_process_that_loads_many_checkpoints_remembers_the_last_and_those_in_use(tmp_path: Path) -> None:
    _pretrained(tmp_path / "base")
    launch.run(_tune_and_save, 1, tmp_path)
    model = build(seed=3)[0]
    dcp.load({"model": model}, tmp_path / "base")
    for number in range(40):
        dcp.load({"model": model}, tmp_path / "run" / "0")
        dcp.save({"weight": torch.ones(2)}, tmp_path / "others" / str(number))
        dcp.load({"weight": torch.ones(2)}, tmp_path / "others" / str(number))
    assert len(loaded_parts) < 20


def test_a_complete_checkpoint_never_reads_init_from(tmp_path: Path) -> None:
    model, optimizer = build(seed=7)
    dcp.save(_state(model, optimizer), tmp_path / "run" / "step-1")
    other, fresh = build(seed=1)
    options = {"init_from": tmp_path / "nowhere", "trainable_only": True}
    assert dcp.resume_or_init(_state(other, fresh), tmp_path / "run", **options).how == "resumed"
    assert_same(dict(other.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("keeper", [{}, {"dir": "node", "durable_every": None}], ids=["keeper", "local tier"])
def test_a_keeper_leaves_out_the_same(tmp_path: Path, keeper: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _pretrained(tmp_path / "base")
    trained: nn.Module | None = None
    for step in range(2):
        model, optimizer = build(seed=step)
        ours = dcp.Checkpointer(trainable_only=True, async_save=True, keeper={"linger": 0.0, **keeper})
        state, run = _state(model, optimizer), tmp_path / "run"
        start = dcp.resume_or_init(state, run, init_from=tmp_path / "base", checkpointer=ours)
        assert start.how == ("resumed" if step else "warm-started")
        if trained is not None:
            assert start.report is not None and len(start.report.left_out) == 16
            assert_same(dict(model.state_dict()), dict(trained.state_dict()))
        train(model, optimizer)
        ours.save(state, run / f"step-{step}", step=step).wait_local()
        ours.close()
        trained = model


def test_a_base_that_is_needed_and_gone_is_named(tmp_path: Path) -> None:
    _pretrained(tmp_path / "base")
    ours, model, optimizer = _tuned_on(tmp_path / "base")
    ours.save(_state(model, optimizer), tmp_path / "run" / "step-1")
    shutil.rmtree(tmp_path / "base")
    with pytest.raises(dcp.CheckpointNotFound, match="nothing is at init_from"):
        dcp.resume_or_init(_state(model, optimizer), tmp_path / "run", init_from=tmp_path / "base")


def test_a_damaged_base_has_no_local_checkpoint_passed_over(tmp_path: Path) -> None:
    """The next start would begin from scratch."""
    _pretrained(tmp_path / "base")
    keeper = {"dir": str(tmp_path / "node"), "durable_every": None, "linger": 0.0}
    ours, model, optimizer = _tuned_on(tmp_path / "base", async_save=True, keeper=keeper)
    ours.save(_state(model, optimizer), tmp_path / "run" / "step-1").wait_local()
    ours.close()
    shutil.copytree(tmp_path / "base", tmp_path / "intact")
    for file in (tmp_path / "base").glob("*.distcp"):
        file.write_bytes(bytes(file.stat().st_size))
    options: dict[str, Any] = {"keeper": keeper, "async_save": True}
    with pytest.raises(dcp.CheckpointCorrupt, match=str(tmp_path / "base")):
        dcp.resume_or_init(_state(*build(seed=3)), tmp_path / "run", init_from=tmp_path / "base", **options)
    start = dcp.resume_or_init(_state(*build(seed=3)), tmp_path / "run", init_from=tmp_path / "intact", **options)
    assert start.how == "resumed"


def test_a_base_may_be_moved_or_copied(tmp_path: Path) -> None:
    _pretrained(tmp_path / "base")
    ours, model, optimizer = _tuned_on(tmp_path / "base")
    ours.save(_state(model, optimizer), tmp_path / "run" / "step-1")
    dcp.copy(tmp_path / "base", tmp_path / "copied")
    shutil.rmtree(tmp_path / "base")
    _check(tmp_path / "copied", tmp_path / "run" / "step-1", model)


def test_what_was_loaded_from_the_runs_own_folder_leaves_nothing_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A rotation may delete it."""
    for base in (tmp_path / "run" / "0", tmp_path / "run" / "deeper" / "0"):
        _pretrained(base)
        ours, model, optimizer = _tuned_on(base, keep_last=1)
        with caplog.at_level(logging.WARNING, "dcp_plugin"):
            ours.save(_state(model, optimizer), tmp_path / "run" / "1")
        assert f"outside of {tmp_path / 'run'}" in caplog.text
        assert _left_out(tmp_path / "run" / "1") == 0


def test_without_a_known_base_everything_is_saved_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = build()
    ours = dcp.Checkpointer(trainable_only=True)
    with caplog.at_level(logging.WARNING, "dcp_plugin"):
        for step in range(2):
            ours.save(_state(model, optimizer), tmp_path / "run" / str(step))
            ours.save(_state(model, optimizer), tmp_path / "run" / f"step-{step}" / "part")
        assert caplog.text.count("16 frozen parameters are saved") == 1
        caplog.clear()
        model.requires_grad_(True)
        ours.save(_state(model, optimizer), tmp_path / "run" / "2")
        assert not caplog.text
    dcp.load(_state(*build(seed=1)), tmp_path / "run" / "1")


def test_a_part_that_is_trained_first_and_frozen_later_is_saved(tmp_path: Path) -> None:
    _pretrained(tmp_path / "base")
    model, optimizer = build(seed=1)
    model.get_submodule("backbone.7").requires_grad_(True)
    optimizer.add_param_group({"params": list(model.get_submodule("backbone.7").parameters())})
    ours = dcp.Checkpointer(trainable_only=True)
    ours.load({"model": model}, tmp_path / "base")
    for step in range(2):
        train(model, optimizer)
        ours.save(_state(model, optimizer), tmp_path / "run" / f"step-{step}")
        model.get_submodule("backbone.7").requires_grad_(False)
    assert _left_out(tmp_path / "run" / "step-1") == 14
    other = build(seed=2)[0]
    dcp.resume_or_init({"model": other}, tmp_path / "run", init_from=tmp_path / "base", strict=False)
    assert_same(dict(other.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("trainable_only", [False, True], ids=["complete", "of what trains"])
def test_a_second_phase_starts_from_the_checkpoint_of_the_first(tmp_path: Path, trainable_only: bool) -> None:
    """The second trains a new part, and leaves out what the first has not left out."""
    _pretrained(tmp_path / "base")
    ours, model, optimizer = _tuned_on(tmp_path / "base")
    first = tmp_path / "first" / "step-1"
    dcp.Checkpointer(trainable_only=trainable_only).save(_state(model, optimizer), first)
    assert _left_out(first) == 16 * trainable_only

    def start() -> tuple[dcp.Checkpointer, nn.Module, dcp.Start]:
        phase = nn.ModuleDict({"net": Tuned().requires_grad_(False), "more": nn.Linear(4, 4)})
        ours = dcp.Checkpointer(trainable_only=True)
        partial = dcp.PartialLoad(include="model.net.*", rename={"model.net.": "model."})
        if trainable_only:
            ours.load({"model": phase}, tmp_path / "base", partial)
        options: dict[str, Any] = {"init_from": first, "partial": partial, "checkpointer": ours}
        return ours, phase, dcp.resume_or_init({"model": phase}, tmp_path / "second", **options)

    ours, phase, _ = start()
    ours.save({"model": phase}, tmp_path / "second" / "step-1")
    assert _left_out(tmp_path / "second" / "step-1") == (16 if trainable_only else 18)
    _, again, restart = start()
    assert restart.how == "resumed"
    assert_same(dict(again.state_dict()), dict(phase.state_dict()))


def test_buffers_of_the_frozen_part_are_saved(tmp_path: Path) -> None:
    """Batch norm counts on in training mode, frozen or not."""

    def net() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 8))
        model[:2].requires_grad_(False)
        return model, torch.optim.SGD(model[2].parameters(), lr=0.1)

    model, optimizer = net()
    dcp.save(_state(model, optimizer), tmp_path / "base")
    ours = dcp.Checkpointer(trainable_only=True)
    ours.load(_state(model, optimizer), tmp_path / "base")
    model(torch.randn(16, 64))
    ours.save(_state(model, optimizer), tmp_path / "run" / "0")
    other, fresh = net()
    dcp.load({"model": other}, tmp_path / "base")
    dcp.load(_state(other, fresh), tmp_path / "run" / "0")
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    assert sorted(dcp.inspect(tmp_path / "run" / "0").left_out) == [
        f"model.{n}.{p}" for n in (0, 1) for p in ("bias", "weight")
    ]


def test_a_base_under_other_names_is_in_a_larger_model(tmp_path: Path) -> None:
    pretrained = nn.ModuleDict({"encoder": Tuned().backbone})
    dcp.save({"net": pretrained}, tmp_path / "base")
    trained: nn.Module | None = None
    for seed, how in enumerate(("warm-started", "resumed")):
        model, optimizer = build(seed=seed)
        ours = dcp.Checkpointer(trainable_only=True)
        rename = {"model.backbone.": "net.encoder."}
        only = dcp.PartialLoad(include=["model.backbone.*"], rename=rename)
        options: dict[str, Any] = {"init_from": tmp_path / "base", "partial": only, "checkpointer": ours}
        assert dcp.resume_or_init(_state(model, optimizer), tmp_path / "run", **options).how == how
        if trained is not None:
            assert_same(dict(model.state_dict()), dict(trained.state_dict()))
        trained = model
        ours.save(_state(model, optimizer), tmp_path / "run" / f"step-{seed}")
        assert _left_out(tmp_path / "run" / f"step-{seed}") == 16


@pytest.mark.parametrize("kind", ["model.safetensors", "pytorch_model.bin", "file"])
def test_files_of_other_tools_can_be_the_base(tmp_path: Path, kind: str) -> None:
    source, _ = build(seed=7)
    base = tmp_path / "pretrained"
    if kind == "file":
        save_file(dict(source.state_dict()), base := tmp_path / "pre.safetensors")
    else:
        base.mkdir()
        write: Any = save_file if kind.endswith("safetensors") else torch.save
        write(dict(source.state_dict()), base / kind)
    model, optimizer = build(seed=1)
    ours = dcp.Checkpointer(trainable_only=True)
    ours.load({"model": model}, base)
    flip_in_memory(model.get_parameter("backbone.5.weight"), 77)
    train(model, optimizer)
    ours.save(_state(model, optimizer), tmp_path / "run" / "0")
    assert _left_out(tmp_path / "run" / "0") == 15
    _check(base, tmp_path / "run" / "0", model)


def test_a_safetensors_base_with_one_other_tensor_is_another_base(tmp_path: Path) -> None:
    """Found by a few bytes of each tensor: such files have no checksums."""
    source, _ = build(seed=7)
    held = {key: value.clone() for key, value in source.state_dict().items()}
    save_file(held, tmp_path / "pre.safetensors")
    model, optimizer = build(seed=1)
    ours = dcp.Checkpointer(trainable_only=True)
    ours.load({"model": model}, tmp_path / "pre.safetensors")
    ours.save(_state(model, optimizer), tmp_path / "run" / "0")
    for key in held:
        if key.startswith("backbone"):
            save_file({**held, key: held[key] * 1.5}, tmp_path / "pre.safetensors")
            with pytest.raises(dcp.CheckpointMismatch, match="left out"):
                _check(tmp_path / "pre.safetensors", tmp_path / "run" / "0", model)


@pytest.mark.parametrize(
    ("stored", "here"),
    [(torch.float32, torch.bfloat16), (torch.float16, torch.float32), (torch.float16, torch.bfloat16)],
)
def test_weights_that_a_load_has_cast_are_left_out(tmp_path: Path, stored: torch.dtype, here: torch.dtype) -> None:
    dcp.save({"model": build(seed=7)[0].to(stored)}, tmp_path / "base")
    model = build(seed=1)[0].to(here)
    ours = dcp.Checkpointer(trainable_only=True)
    cast = {"init_from": tmp_path / "base", "partial": dcp.PartialLoad(cast=True)}
    dcp.resume_or_init({"model": model}, tmp_path / "run", checkpointer=ours, **cast)
    ours.save({"model": model}, tmp_path / "run" / "step-1")
    assert _left_out(tmp_path / "run" / "step-1") == 16
    other = build(seed=2)[0].to(here)
    assert dcp.resume_or_init({"model": other}, tmp_path / "run", trainable_only=True, **cast).how == "resumed"
    assert_same(dict(other.state_dict()), dict(model.state_dict()))


def test_weights_that_were_rounded_are_not_loaded_into_a_wider_dtype(tmp_path: Path) -> None:
    """It would get the numbers of the base, which were not those of the training."""
    dcp.save({"model": build(seed=7)[0]}, tmp_path / "base")
    model = build(seed=1)[0].to(torch.bfloat16)
    ours = dcp.Checkpointer(trainable_only=True)
    ours.load({"model": model}, tmp_path / "base")
    ours.save({"model": model}, tmp_path / "run" / "0")
    other = build(seed=2)[0]
    dcp.load({"model": other}, tmp_path / "base")
    with pytest.raises(dcp.CheckpointMismatch, match="rounded to another dtype"):
        dcp.load({"model": other}, tmp_path / "run" / "0")


def test_weights_that_were_rounded_stay_so_if_another_model_has_loaded_them_exactly(tmp_path: Path) -> None:
    dcp.save({"model": build(seed=7)[0]}, tmp_path / "base")
    rounded, exact = build(seed=1)[0].to(torch.bfloat16), build(seed=2)[0]
    ours = dcp.Checkpointer(trainable_only=True)
    for model in (rounded, exact):
        ours.load({"model": model}, tmp_path / "base")
    ours.save({"model": rounded}, tmp_path / "run" / "0")
    with pytest.raises(dcp.CheckpointMismatch, match="rounded to another dtype"):
        ours.load({"model": exact}, tmp_path / "run" / "0")


class _Hooked(Tuned):
    """A model whose own code takes part in a load, and gets all keys."""

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        assert state_dict.keys() == self.state_dict().keys()
        return super().load_state_dict(state_dict, strict, assign)


class _Tied(Tuned):
    def __init__(self) -> None:
        super().__init__()
        self.backbone[1] = self.backbone[0]


@pytest.mark.parametrize("kind", [_Hooked, _Tied])
def test_models_with_code_of_their_own_and_tied_weights(tmp_path: Path, kind: type[nn.Module]) -> None:
    dcp.save({"model": kind()}, tmp_path / "base")
    saved: nn.Module | None = None
    for step in range(2):
        model, ours = kind(), dcp.Checkpointer(trainable_only=True)
        dcp.resume_or_init({"model": model}, tmp_path / "run", init_from=tmp_path / "base", checkpointer=ours)
        if saved is not None:
            assert_same(dict(model.state_dict()), dict(saved.state_dict()))
        ours.save({"model": model}, tmp_path / "run" / f"step-{step}")
        assert _left_out(tmp_path / "run" / f"step-{step}") == 16
        saved = model


def test_a_mapping_keeps_what_it_has(tmp_path: Path) -> None:
    _pretrained(tmp_path / "base")
    ours, model, optimizer = _tuned_on(tmp_path / "base")
    ours.save(_state(model, optimizer), tmp_path / "run" / "0")
    tensors = {key: torch.zeros_like(value) for key, value in model.state_dict().items()}
    with pytest.raises(dcp.CheckpointMismatch, match="left out"):
        Internals(ours).restore({"model": tensors}, tmp_path / "run" / "0")
    ours.load({"model": tensors}, tmp_path / "base")
    Internals(ours).restore({"model": tensors}, tmp_path / "run" / "0")
    assert_same(tensors, dict(model.state_dict()))


def test_tools_say_what_is_absent(tmp_path: Path) -> None:
    _pretrained(tmp_path / "base")
    ours, model, optimizer = _tuned_on(tmp_path / "base")
    path = tmp_path / "run" / "0"
    ours.save(_state(model, optimizer), path)
    absent = rf"leaves out model\.backbone\.0\.weight.*loaded from {tmp_path / 'base'}"
    with pytest.warns(UserWarning, match=absent):
        assert "model.backbone.0.weight" not in dcp.read(path)
    with pytest.warns(UserWarning, match=absent):
        assert "model.backbone.0.weight" in dcp.diff(path, tmp_path / "base").added
    with pytest.warns(UserWarning, match=absent):
        dcp.load({"model": {}}, path)
    for report in (
        dcp.verify(path).absent,
        dcp.export(path, tmp_path / "out.safetensors").notes,
        dcp.copy(path, tmp_path / "copied").needs,
    ):
        assert any("leaves out model.backbone.0.weight" in line for line in report)
    assert dcp.verify(path).ok


def test_a_summary_that_does_not_name_the_base_is_damaged(tmp_path: Path) -> None:
    _pretrained(tmp_path / "base")
    ours, model, optimizer = _tuned_on(tmp_path / "base")
    ours.save(_state(model, optimizer), tmp_path / "run" / "0")
    for base in ({}, {"path": 1, "fingerprint": ""}):
        change_summary(tmp_path / "run" / "0", base=base)
        with pytest.raises(dcp.CheckpointCorrupt, match="base"):
            ours.load(_state(model, optimizer), tmp_path / "run" / "0")


def test_a_base_is_deleted_and_overwritten_like_any_other_checkpoint(tmp_path: Path) -> None:
    _pretrained(tmp_path / "base")
    ours, model, optimizer = _tuned_on(tmp_path / "base")
    ours.save(_state(model, optimizer), tmp_path / "run" / "0")
    ours.save(_state(model, optimizer), tmp_path / "base")
    assert _left_out(tmp_path / "base") == 0  # it is in the folder of this save
    ours.remove(tmp_path / "base")
    assert names_in(tmp_path) == ["run"]


def test_excluded_keys_are_not_saved_and_a_load_says_why_they_are_missing(tmp_path: Path) -> None:
    model, optimizer = build()
    dcp.save(_state(model, optimizer), tmp_path / "0", exclude=["*.backbone.*"])
    keys = {tensor.key for tensor in dcp.inspect(tmp_path / "0").tensors}
    assert keys == {"model.head.weight", "model.head.bias"}
    other, fresh = build(seed=1)
    with pytest.raises(dcp.CheckpointMismatch, match=r"left out at save by exclude=\['\*.backbone.\*'\]"):
        dcp.load(_state(other, fresh), tmp_path / "0")
    dcp.load(_state(other, fresh), tmp_path / "0", dcp.PartialLoad(exclude="*.backbone.*"))
    assert torch.equal(other.get_parameter("head.weight"), model.get_parameter("head.weight"))


def test_an_exclude_that_matches_nothing_is_an_error_at_the_first_save(tmp_path: Path) -> None:
    model, optimizer = build()
    with pytest.raises(
        dcp.CheckpointMismatch, match=r"exclude=\['model.backbon.\*'\] matches no key.*model\.backbone\."
    ):
        dcp.save(_state(model, optimizer), tmp_path / "0", exclude=["model.backbon.*"])
    assert not names_in(tmp_path)
    ours = dcp.Checkpointer(exclude=["*.teacher.*"])
    state: dict[str, Any] = {"model": nn.ModuleDict({"student": nn.Linear(2, 2), "teacher": nn.Linear(2, 2)})}
    ours.save(state, tmp_path / "0")
    del state["model"]["teacher"]
    ours.save(state, tmp_path / "1")


@on_ranks(1)
def test_lora_on_a_gpt_writes_three_hundredths_at_most(tmp_path: Path) -> None:
    from benchmarks.reuse import gpt_with_lora, train  # brings Lightning, so not in the tests' own process

    state = gpt_with_lora()
    with finished_saves() as events:
        ours = dcp.Checkpointer()
        ours.save(state, tmp_path / "base")
        for name, saving in (("linked", ours), ("small", dcp.Checkpointer(trainable_only=True))):
            if name == "small":
                saving.load(state, tmp_path / "base")
            train(state)
            path = tmp_path / "run" / name if name == "small" else tmp_path / name
            saving.save(state, path)
            other = gpt_with_lora()
            dcp.load(other, tmp_path / "base")
            dcp.load(other, path)
            assert_same(dict(other["model"].state_dict()), dict(state["model"].state_dict()))
    first, linked, small = (event.bytes for event in events)
    assert linked <= 0.03 * first
    assert small <= 0.03 * first


@pytest.mark.parametrize(
    "left_out", ["[1]", "{", '{"model.head.bias": "x"}', "[" * 99_999], ids=["no object", "cut", "stored too", "deep"]
)
def test_a_list_of_what_is_left_out_that_contradicts_itself_is_refused(tmp_path: Path, left_out: str) -> None:
    _pretrained(tmp_path / "base")
    file = tmp_path / "base" / INDEX
    index = index_file.decode(file.read_bytes(), hashlib.sha256(file.read_bytes()).hexdigest(), str(file))
    index.columns["left_out"] = np.frombuffer(left_out.encode(), np.uint8)
    file.write_bytes(index_file.encode(index))
    with pytest.raises(dcp.CheckpointCorrupt, match="damaged"):
        index_file.decode(file.read_bytes(), hashlib.sha256(file.read_bytes()).hexdigest(), str(file))


# Several ranks


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A checkpoint that one process has saved."""
    _pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.one_of
@pytest.mark.parametrize(
    ("world_size", "layouts"), [(2, ["ddp", "fsdp1", "fsdp2"]), (4, ["hsdp"])], ids=["2 ranks", "4 ranks"]
)
@on_ranks()
def test_every_layout_leaves_out_the_frozen_part_on_all_ranks(base: Path, world_size: int, layouts: list[str]) -> None:
    """A warm start, then a resume; one bit of one rank's shard has changed."""
    warnings.simplefilter("ignore")
    for layout in layouts:
        run = base.parent / layout
        model, optimizer = build(layout, seed=1)
        ours = dcp.Checkpointer(trainable_only=True)
        ours.load(_state(model, optimizer), base)
        train(model, optimizer)
        with finished_saves() as events:
            ours.save(_state(model, optimizer), run / "0")
        assert sum(gathered(events[0].bytes)) <= 0.11 * sum(file.stat().st_size for file in base.glob("*.distcp"))
        if layout == "fsdp2" and dist.get_rank() == 1:
            shard: Any = model.get_parameter("backbone.6.weight")
            flip_in_memory(shard.to_local(), 99)
        train(model, optimizer)
        ours.save(_state(model, optimizer), run / "1")
        left_out = dcp.inspect(run / "1").left_out
        assert ("model.backbone.6.weight" in left_out) == (layout != "fsdp2")
        assert len(left_out) == (15 if layout == "fsdp2" else 16)
        other, fresh = build(layout, seed=2)
        with pytest.raises(dcp.CheckpointMismatch, match="here they have other bytes"):
            ours.load(_state(other, fresh), run / "1")
        ours.load(_state(other, fresh), base)
        ours.load(_state(other, fresh), run / "1")
        ours.close()
        whole = full_state(model.state_dict())
        assert_same(full_state(other.state_dict()), whole)
        alone, fresh = build(seed=5)
        solo = dcp.Checkpointer(solo=True)
        solo.load({"model": alone}, base)
        solo.load(_state(alone, fresh), run / "1")
        assert_same(dict(alone.state_dict()), {key.removeprefix("module."): value for key, value in whole.items()})


@on_ranks(2)
def test_a_parameter_that_one_rank_trains_is_saved(base: Path) -> None:
    model = build("fsdp2", seed=1)[0]
    ours = dcp.Checkpointer(trainable_only=True)
    ours.load({"model": model}, base)
    shard: Any = model.get_parameter("backbone.6.weight")
    if dist.get_rank() == 1:
        flip_in_memory(shard.requires_grad_(True).to_local(), 99)
    ours.save({"model": model}, base.parent / "run" / "0")
    assert "model.backbone.6.weight" not in dcp.inspect(base.parent / "run" / "0").left_out
    ours.close()


def _in_layout(layout: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    if layout != "tp":
        return build(layout, seed)
    model, _ = build(seed=seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(
        model,
        mesh,
        {
            "backbone.*": ColwiseParallel(output_layouts=Replicate()),
            "head": RowwiseParallel(input_layouts=Replicate()),
        },
    )
    return model, torch.optim.SGD(model.get_submodule("head").parameters(), lr=0.01)


def _life(root: Path, layout: str, first: bool) -> None:
    """A start on any number of ranks, and a save: everything is as the last life has left it."""
    model, optimizer = _in_layout(layout, seed=dist.get_world_size())
    ours = dcp.Checkpointer(trainable_only=True)
    start = dcp.resume_or_init(_state(model, optimizer), root / "run", init_from=root / "base", checkpointer=ours)
    assert start.how == ("warm-started" if first else "resumed")
    whole = full_state(model.state_dict())
    if not first:
        assert_same(whole, torch.load(root / "whole.pt"))
    train(model, optimizer)
    step = (start.step or 0) + 1
    ours.save(_state(model, optimizer), root / "run" / f"step-{step}", step=step)
    assert _left_out(root / "run" / f"step-{step}") == 16
    whole = full_state(model.state_dict())
    if dist.get_rank() == 0:
        torch.save(whole, root / "whole.pt")
    ours.close()


@pytest.mark.one_of
@pytest.mark.parametrize("layout", ["fsdp2", "tp"])
def test_a_run_goes_on_with_one_two_and_three_ranks(base: Path, layout: str) -> None:
    for number, world_size in enumerate((1, 2, 3, 2, 1, 3)):
        of_life = "plain" if world_size == 1 else layout
        launch.run(_life, world_size, base.parent, of_life, number == 0)


@on_ranks(2)
def test_a_glob_may_match_on_one_rank_alone_and_the_error_comes_on_all(tmp_path: Path) -> None:
    only = {"mine": torch.ones(4)} if dist.get_rank() == 1 else {"other": torch.ones(4)}
    dcp.save(only, tmp_path / "0", exclude=["mine"])
    with pytest.raises(dcp.CheckpointMismatch, match="matches no key"):
        dcp.save(only, tmp_path / "1", exclude=["nobodys"])
