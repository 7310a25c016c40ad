"""Checkpoints of what trains alone, completed from their base; keys that are left out on purpose."""

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

import dcp_plugin as dcp
from dcp_plugin.events import SaveFinished
from dcp_plugin.format import INDEX, index_file
from dcp_plugin.runs import retention
from tests.compare import assert_same, full_state
from tests.damage import flip_in_memory
from tests.finetune import Tuned, build, finished_saves, train
from tests.forge import change_summary
from tests.launch import gathered, on_ranks
from tests.places import is_tidy, names_in


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


def _check(path: Path, model: nn.Module, **options: Any) -> None:
    other, fresh = build(seed=2)
    dcp.load(_state(other, fresh), path, **options)
    assert_same(full_state(other.state_dict()), full_state(model.state_dict()))


def test_only_what_trains_is_written_and_the_load_is_completed_from_the_base(
    tmp_path: Path, events: list[SaveFinished]
) -> None:
    _pretrained(tmp_path / "base")
    ours, model, optimizer = _tuned_on(tmp_path / "base")
    ours.save(_state(model, optimizer), tmp_path / "run" / "0")
    assert events[1].bytes <= 0.11 * events[0].bytes
    _check(tmp_path / "run" / "0", model)
    assert dcp.verify(tmp_path / "run" / "0").ok
    info = dcp.inspect(tmp_path / "run" / "0")
    assert info.base == tmp_path / "base"
    assert len(info.left_out) == 16 and str(tmp_path / "base") in str(info)


def test_stock_torch_misses_what_is_left_out(tmp_path: Path) -> None:
    _pretrained(tmp_path / "base")
    ours, model, optimizer = _tuned_on(tmp_path / "base")
    ours.save(_state(model, optimizer), tmp_path / "run")
    head = {"model.head.weight": torch.zeros_like(model.get_parameter("head.weight"))}
    stock.load(head, checkpoint_id=tmp_path / "run")
    assert torch.equal(head["model.head.weight"], model.get_parameter("head.weight"))
    with pytest.raises(BaseException, match="Missing key"):
        stock.load({"model.backbone.0.weight": torch.zeros(256, 256)}, checkpoint_id=tmp_path / "run")


@pytest.mark.parametrize("async_save", [False, True], ids=["blocking", "in the background"])
def test_a_frozen_parameter_that_has_changed_by_one_bit_is_saved(
    tmp_path: Path, async_save: bool, caplog: pytest.LogCaptureFixture
) -> None:
    _pretrained(tmp_path / "base")
    ours, model, optimizer = _tuned_on(tmp_path / "base", async_save=async_save)
    flip_in_memory(model.get_parameter("backbone.3.weight"), 12_345)
    with caplog.at_level(logging.WARNING, "dcp_plugin"):
        for step in range(2):
            ours.save(_state(model, optimizer), tmp_path / str(step))
        ours.close()
    assert caplog.text.count("model.backbone.3.weight") == 1
    assert "model.backbone.3.weight" in {tensor.key for tensor in dcp.inspect(tmp_path / "1").tensors}
    _check(tmp_path / "1", model)


def test_a_resumed_run_keeps_the_base_of_its_checkpoint(tmp_path: Path, events: list[SaveFinished]) -> None:
    _pretrained(tmp_path / "base")
    ours, model, optimizer = _tuned_on(tmp_path / "base")
    flip_in_memory(model.get_parameter("backbone.3.weight"), 5)
    ours.save(_state(model, optimizer), tmp_path / "run" / "0")
    model, optimizer = build(seed=3)
    resumed = dcp.Checkpointer(trainable_only=True)
    resumed.load(_state(model, optimizer), tmp_path / "run" / "0")
    train(model, optimizer)
    resumed.save(_state(model, optimizer), tmp_path / "run" / "1")
    shutil.rmtree(tmp_path / "run" / "0")
    assert dcp.inspect(tmp_path / "run" / "1").base == tmp_path / "base"
    _check(tmp_path / "run" / "1", model)
    assert events[2].bytes + events[2].bytes_reused < 0.25 * events[0].bytes


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
    ours.save(_state(model, optimizer), tmp_path / "run")
    other, fresh = net()
    dcp.load(_state(other, fresh), tmp_path / "run")
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    assert sorted(dcp.inspect(tmp_path / "run").left_out) == [
        f"model.{n}.{p}" for n in (0, 1) for p in ("bias", "weight")
    ]


def test_a_base_under_other_names_completes_a_larger_model(tmp_path: Path) -> None:
    pretrained = nn.ModuleDict({"encoder": Tuned().backbone})
    dcp.save({"net": pretrained}, tmp_path / "base")
    model, optimizer = build(seed=1)
    ours = dcp.Checkpointer(trainable_only=True)
    rename = {"model.backbone.": "net.encoder."}
    ours.load({"model": model}, tmp_path / "base", dcp.PartialLoad(include=["model.backbone.*"], rename=rename))
    ours.save(_state(model, optimizer), tmp_path / "run")
    assert len(dcp.inspect(tmp_path / "run").left_out) == 16
    _check(tmp_path / "run", model)


def test_a_safetensors_file_can_be_the_base_named_or_loaded(tmp_path: Path) -> None:
    source, _ = build(seed=7)
    save_file(dict(source.state_dict()), tmp_path / "pre.safetensors")
    for loaded in (True, False):
        model, optimizer = build(seed=7)
        ours = dcp.Checkpointer(trainable_only=True, base=None if loaded else tmp_path / "pre.safetensors")
        if loaded:
            ours.load({"model": model}, tmp_path / "pre.safetensors")
        flip_in_memory(model.get_parameter("backbone.5.weight"), 77)
        train(model, optimizer)
        path = tmp_path / f"loaded {loaded}"
        ours.save(_state(model, optimizer), path)
        assert len(dcp.inspect(path).left_out) == 15
        _check(path, model)


def test_a_folder_of_safetensors_can_be_the_base(tmp_path: Path) -> None:
    source, _ = build(seed=7)
    (tmp_path / "pretrained").mkdir()
    save_file(dict(source.state_dict()), tmp_path / "pretrained" / "model.safetensors")
    model, optimizer = build(seed=7)
    ours = dcp.Checkpointer(trainable_only=True)
    ours.load({"model": model}, tmp_path / "pretrained")
    train(model, optimizer)
    ours.save(_state(model, optimizer), tmp_path / "run")
    assert len(dcp.inspect(tmp_path / "run").left_out) == 16
    _check(tmp_path / "run", model)


def test_without_a_known_base_the_first_save_says_what_to_do(tmp_path: Path) -> None:
    model, optimizer = build()
    with pytest.raises(dcp.SaveFailed, match=r"base=PATH"):
        dcp.save(_state(model, optimizer), tmp_path / "run", trainable_only=True)
    assert not names_in(tmp_path)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    dcp.save(_state(model, optimizer), tmp_path / "run", trainable_only=True)
    assert dcp.inspect(tmp_path / "run").base is None


def test_a_moved_base_is_found_by_name_or_beside_and_another_one_is_refused(tmp_path: Path) -> None:
    _pretrained(tmp_path / "a" / "base")
    ours, model, optimizer = _tuned_on(tmp_path / "a" / "base")
    ours.save(_state(model, optimizer), tmp_path / "a" / "run")
    shutil.move(tmp_path / "a", tmp_path / "b")
    _check(tmp_path / "b" / "run", model)
    shutil.move(tmp_path / "b" / "base", tmp_path / "moved")
    with pytest.raises(dcp.CheckpointNotFound, match="base=PATH"):
        _check(tmp_path / "b" / "run", model)
    assert dcp.latest(tmp_path / "b") == tmp_path / "b" / "run"
    _check(tmp_path / "b" / "run", model, base=tmp_path / "moved")
    assert dcp.verify(tmp_path / "b" / "run", base=tmp_path / "moved").ok
    dcp.save(_state(*build(seed=9)), tmp_path / "other")
    with pytest.raises(dcp.CheckpointMismatch, match=f"(?s){tmp_path / 'b' / 'run'}.*{tmp_path / 'other'} is not"):
        _check(tmp_path / "b" / "run", model, base=tmp_path / "other")


def test_a_base_is_neither_overwritten_nor_pruned_by_what_needs_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _pretrained(tmp_path / "base")
    ours, model, optimizer = _tuned_on(tmp_path / "base", keep_last=1)
    with pytest.raises(dcp.SaveFailed, match="this path is the base"):
        ours.save(_state(model, optimizer), tmp_path / "base")
    with caplog.at_level(logging.WARNING, "dcp_plugin"):
        for step in range(3):
            ours.save(_state(model, optimizer), tmp_path / str(step))
        ours.remove(tmp_path / "base")
    assert names_in(tmp_path) == ["2", "base"]
    assert caplog.text.count("is not deleted") == 1  # not after every save
    _check(tmp_path / "2", model)


def test_a_policy_does_not_select_a_base_among_the_states_that_are_listed(tmp_path: Path) -> None:
    _pretrained(tmp_path / "base")
    ours, model, optimizer = _tuned_on(tmp_path / "base")
    for step in range(3):
        ours.save(_state(model, optimizer), tmp_path / str(step), step)
    selected = dcp.Retention(newest=1).select(dcp.list_checkpoints(tmp_path))
    assert [state.path.name for state in selected] == ["1", "0"]


def test_a_base_that_was_loaded_through_a_link_is_still_found_when_the_link_has_moved_on(tmp_path: Path) -> None:
    _pretrained(tmp_path / "0")
    last = tmp_path / "last"
    last.symlink_to("0")
    ours, model, optimizer = _tuned_on(last)
    for name in ("1", "2"):
        ours.save(_state(model, optimizer), tmp_path / name)
        last.unlink()
        last.symlink_to(name)
    assert dcp.inspect(tmp_path / "2").base == tmp_path / "0"
    ours.remove(tmp_path / "0")
    _check(tmp_path / "2", model)


@pytest.mark.parametrize(
    ("fate", "named"),
    [("deleted", False), ("overwritten", True), ("cut", False)],
    ids=["deleted", "overwritten", "cut"],
)
def test_all_is_saved_once_the_base_cannot_complete_it_any_more(
    tmp_path: Path, fate: str, named: bool, caplog: pytest.LogCaptureFixture
) -> None:
    _pretrained(tmp_path / "base")
    if named:
        model, optimizer = build(seed=7)
        ours = dcp.Checkpointer(trainable_only=True, base=tmp_path / "base")
    else:
        ours, model, optimizer = _tuned_on(tmp_path / "base")
    ours.save(_state(model, optimizer), tmp_path / "run" / "0")
    assert len(dcp.inspect(tmp_path / "run" / "0").left_out) == 16
    if fate == "deleted":
        shutil.rmtree(tmp_path / "base")
    elif fate == "overwritten":
        dcp.save(_state(*build(seed=9)), tmp_path / "base")
    else:
        max((tmp_path / "base").glob("*.distcp"), key=lambda file: file.stat().st_size).write_bytes(b"")
    with caplog.at_level(logging.WARNING, "dcp_plugin"):
        for step in (1, 2):
            ours.save(_state(model, optimizer), tmp_path / "run" / str(step))
    assert caplog.text.count("everything is saved") == 1 and str(tmp_path / "base") in caplog.text
    assert dcp.inspect(tmp_path / "run" / "2").base is None
    _check(tmp_path / "run" / "2", model)


def test_a_safetensors_base_with_one_other_tensor_is_another_base(tmp_path: Path) -> None:
    """Found by a few bytes of each tensor: such files have no checksums."""
    source, _ = build(seed=7)
    held = {key: value.clone() for key, value in source.state_dict().items()}
    save_file(held, tmp_path / "pre.safetensors")
    model, optimizer = build(seed=1)
    ours = dcp.Checkpointer(trainable_only=True)
    ours.load({"model": model}, tmp_path / "pre.safetensors")
    ours.save(_state(model, optimizer), tmp_path / "run")
    _check(tmp_path / "run", model)
    for key in held:
        if key.startswith("backbone"):
            save_file({**held, key: held[key] * 1.5}, tmp_path / "pre.safetensors")
            with pytest.raises(dcp.CheckpointMismatch, match="is not that base"):
                _check(tmp_path / "run", model)


def test_what_was_rounded_when_it_was_loaded_is_saved(tmp_path: Path) -> None:
    """Loaded as float32, the checkpoint is what was trained, not what the base had before it was rounded."""
    _pretrained(tmp_path / "exact")
    rounded, _ = build(seed=7)
    dcp.save({"model": rounded.to(torch.float16)}, tmp_path / "rounded")
    for base, dtype, left_out in (
        ("exact", torch.bfloat16, 0),
        ("rounded", torch.bfloat16, 0),
        ("rounded", torch.float32, 16),
    ):
        for named in (False, True):
            model, _ = build(seed=7)
            if named:
                dcp.load({"model": model}, tmp_path / base)
            model.to(dtype)
            ours = dcp.Checkpointer(trainable_only=True, base=tmp_path / base if named else None)
            if not named:
                ours.load({"model": model}, tmp_path / base)
            ours.save({"model": model}, tmp_path / "run")
            assert len(dcp.inspect(tmp_path / "run").left_out) == left_out, (base, dtype, named)
            other = build(seed=2)[0]
            dcp.load({"model": other}, tmp_path / "run")
            assert_same(dict(other.state_dict()), {key: value.float() for key, value in model.state_dict().items()})


def test_a_checkpoint_that_completes_its_neighbour_is_not_overwritten_by_anybody(tmp_path: Path) -> None:
    _pretrained(tmp_path / "last")
    ours, model, optimizer = _tuned_on(tmp_path / "last")
    ours.save(_state(model, optimizer), tmp_path / "0")
    with pytest.raises(dcp.SaveFailed, match=r"/0 leaves out.*new name"):
        dcp.save(_state(*build(seed=9)), tmp_path / "last")
    with pytest.raises(dcp.SaveFailed, match=r"/0 leaves out"):
        retention.link(tmp_path / "last", tmp_path / "0")
    assert is_tidy(tmp_path)
    _check(tmp_path / "0", model)
    ours.remove(tmp_path / "0")
    dcp.save(_state(*build(seed=9)), tmp_path / "last")


def test_a_base_that_moved_with_its_run_is_still_not_pruned_or_overwritten(tmp_path: Path) -> None:
    _pretrained(tmp_path / "a" / "base")
    ours, model, optimizer = _tuned_on(tmp_path / "a" / "base")
    ours.save(_state(model, optimizer), tmp_path / "a" / "0")
    shutil.move(tmp_path / "a", tmp_path / "b")
    ours.remove(tmp_path / "b" / "base")
    with pytest.raises(dcp.SaveFailed, match="leaves out"):
        dcp.save(_state(*build(seed=9)), tmp_path / "b" / "base")
    _check(tmp_path / "b" / "0", model)
    shutil.rmtree(tmp_path / "b" / "base")
    dcp.save(_state(*build(seed=9)), tmp_path / "b" / "base")
    ours.remove(tmp_path / "b" / "base")  # another checkpoint, which nobody needs
    assert not (tmp_path / "b" / "base").exists()


def test_a_checkpoint_with_a_base_is_no_base(tmp_path: Path) -> None:
    _pretrained(tmp_path / "base")
    ours, model, optimizer = _tuned_on(tmp_path / "base")
    ours.save(_state(model, optimizer), tmp_path / "run" / "0")
    with pytest.raises(dcp.CheckpointMismatch, match="cannot be the base"):
        dcp.save(_state(model, optimizer), tmp_path / "run" / "1", trainable_only=True, base=tmp_path / "run" / "0")


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
            saving.save(state, tmp_path / name)
            other = gpt_with_lora()
            dcp.load(other, tmp_path / name)
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


def test_two_checkpoints_that_name_each_other_as_base_are_refused(tmp_path: Path) -> None:
    """What is left out is looked for in the base alone, not in the base's base."""
    _pretrained(tmp_path / "base")
    ours, model, optimizer = _tuned_on(tmp_path / "base")
    ours.save(_state(model, optimizer), tmp_path / "run")
    run = tmp_path / "run"
    said = {"path": str(run), "relative": ".", "fingerprint": dcp.ShardedReader(run).fingerprint}
    change_summary(run, base=said)
    with pytest.raises(dcp.CheckpointMismatch, match=r"has no model\.backbone"):
        _check(tmp_path / "run", model)
    change_summary(run, base={**said, "path": "no name\0", "relative": "neither\0"})
    with pytest.raises(dcp.CheckpointNotFound, match="does not exist"):
        _check(tmp_path / "run", model)
    change_summary(run, base={})
    with pytest.raises(dcp.CheckpointCorrupt, match="does not name the base"):
        _check(tmp_path / "run", model)


def test_a_damaged_base_is_noticed(tmp_path: Path) -> None:
    _pretrained(tmp_path / "base")
    ours, model, optimizer = _tuned_on(tmp_path / "base")
    ours.save(_state(model, optimizer), tmp_path / "run")
    largest = max((tmp_path / "base").glob("*.distcp"), key=lambda file: file.stat().st_size)
    with open(largest, "r+b") as file:
        file.seek(largest.stat().st_size // 3)
        file.write(b"oops")
    assert not dcp.verify(tmp_path / "run").ok
    with pytest.raises(dcp.CheckpointCorrupt, match="checksum"):
        _check(tmp_path / "run", model)
    largest.unlink()
    with pytest.raises(dcp.CheckpointCorrupt, match="missing"):
        _check(tmp_path / "run", model)


def test_a_copy_of_a_run_is_completed_from_its_own_base_when_the_original_one_is_damaged(tmp_path: Path) -> None:
    _pretrained(tmp_path / "a" / "base")
    ours, model, optimizer = _tuned_on(tmp_path / "a" / "base")
    ours.save(_state(model, optimizer), tmp_path / "a" / "run")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for index in (tmp_path / "a" / "base").glob("*.index"):
        index.write_bytes(b"")
    _check(tmp_path / "b" / "run", model)
    with pytest.raises(dcp.CheckpointCorrupt, match=str(tmp_path / "a" / "base")):
        _check(tmp_path / "a" / "run", model)


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
        ours.close()
        left_out = dcp.inspect(run / "1").left_out
        assert ("model.backbone.6.weight" in left_out) == (layout != "fsdp2")
        assert len(left_out) == (15 if layout == "fsdp2" else 16)
        other, fresh = build(layout, seed=2)
        dcp.load(_state(other, fresh), run / "1")
        whole = full_state(model.state_dict())
        assert_same(full_state(other.state_dict()), whole)
        alone, fresh = build(seed=5)
        dcp.Checkpointer(solo=True).load(_state(alone, fresh), run / "1")
        assert_same(dict(alone.state_dict()), {key.removeprefix("module."): value for key, value in whole.items()})


@on_ranks(2)
def test_a_glob_may_match_on_one_rank_alone_and_the_error_comes_on_all(tmp_path: Path) -> None:
    only = {"mine": torch.ones(4)} if dist.get_rank() == 1 else {"other": torch.ones(4)}
    dcp.save(only, tmp_path / "0", exclude=["mine"])
    with pytest.raises(dcp.CheckpointMismatch, match="matches no key"):
        dcp.save(only, tmp_path / "1", exclude=["nobodys"])
