"""What has not changed is linked and not written, and each checkpoint is whole without the others."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from safetensors.numpy import load_file
from torch import nn

import dcp_plugin as dcp
from dcp_plugin.core.format import INDEX, index_file
from dcp_plugin.core.format.payload import hashes_in
from dcp_plugin.core.media import medium_of
from dcp_plugin.core.media.places import WORKSPACE
from dcp_plugin.core.paths import Where
from dcp_plugin.core.tensors.host_memory import memory_view
from dcp_plugin.events import SaveFinished
from tests import launch
from tests.compare import assert_same, full_state
from tests.damage import bad_disk, flip_byte, flip_in_memory, raising
from tests.finetune import WIDTH, build, finished_saves, train
from tests.forge import change_summary
from tests.launch import gathered, on_ranks
from tests.messages import logged
from tests.places import is_tidy, names_in, stock_reader

LAYER = WIDTH * WIDTH * 4
FIRST = "backbone.0.weight"


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model, "optim": optimizer}


def _loaded_by_stock(path: Where, model: nn.Module) -> dict[str, torch.Tensor]:
    state = {f"model.{key}": torch.zeros_like(value) for key, value in model.state_dict().items()}
    stock.load(state, storage_reader=stock_reader(path))
    return {key.removeprefix("model."): value for key, value in state.items()}


def _check_alone(path: Where, model: nn.Module) -> None:
    """Delete all other checkpoints: stock torch loads this one, and no byte of it is damaged."""
    medium = medium_of(path)
    for other in medium.entries(path.parent):
        if other.path != path and other.path.name != WORKSPACE:
            medium.remove(other.path)
    assert_same(_loaded_by_stock(path, model), full_state(model.state_dict()))
    assert dcp.verify(path).ok


def test_second_checkpoint_with_a_frozen_backbone_writes_a_tenth_of_the_first(
    place: Where, events: list[SaveFinished]
) -> None:
    model, optimizer = build()
    ours = dcp.Checkpointer()
    for step in range(3):
        train(model, optimizer)
        ours.save(_state(model, optimizer), place / str(step), step)
    first, second, third = events
    assert first.bytes_reused == 0
    assert second.bytes <= 0.11 * first.bytes
    assert third.bytes == second.bytes
    assert second.bytes + second.bytes_reused == first.bytes
    info = dcp.inspect(place / "2")
    assert info.bytes_reused == third.bytes_reused
    assert "linked" in str(info)
    _check_alone(place / "2", model)


@pytest.mark.parametrize("element", [0, 700, LAYER // 4 - 1], ids=["first", "where nobody samples", "last"])
def test_one_flipped_bit_in_a_frozen_tensor_is_noticed_and_written(
    tmp_path: Path, events: list[SaveFinished], element: int
) -> None:
    model, optimizer = build()
    ours = dcp.Checkpointer()
    ours.save(_state(model, optimizer), tmp_path / "0")
    ours.save(_state(model, optimizer), tmp_path / "1")
    flip_in_memory(model.get_parameter(FIRST), element)
    ours.save(_state(model, optimizer), tmp_path / "2")
    assert LAYER <= events[2].bytes - events[1].bytes < 6 * LAYER, "its file, not those of other layers"
    ours.save(_state(model, optimizer), tmp_path / "3")
    assert events[3].bytes_reused > 6 * LAYER, "the others are linked again"
    for path in ("2", "3"):
        assert_same(_loaded_by_stock(tmp_path / path, model), full_state(model.state_dict()))
        assert dcp.verify(tmp_path / path).ok
    flip_in_memory(model.get_parameter(FIRST), element)
    assert_same(_loaded_by_stock(tmp_path / "1", model), full_state(model.state_dict()))


def test_what_stays_the_same_without_being_frozen_is_linked_from_the_third_save_on(
    tmp_path: Path, events: list[SaveFinished]
) -> None:
    state = {"table": torch.randn(512, 512), "counts": torch.zeros(512, 512)}
    ours = dcp.Checkpointer()
    for step in range(4):
        state["counts"] += 1
        ours.save(state, tmp_path / str(step))
    written = [event.bytes for event in events]
    assert written[0] == written[1] > 2 * written[2] * 0.99
    assert written[2] == written[3]
    other = {"table": torch.zeros(512, 512), "counts": torch.zeros(512, 512)}
    shutil.rmtree(tmp_path / "1")
    dcp.load(other, tmp_path / "3")
    assert_same(other, state)


def _linkable(path: Path) -> bool:
    """Whether the index marks files that are meant to be linked."""
    return bool(dcp.ShardedReader(path).index.linkable)


def test_what_changes_at_every_save_is_never_meant_to_be_linked(tmp_path: Path, events: list[SaveFinished]) -> None:
    state = {"weights": torch.randn(512, 512)}
    ours = dcp.Checkpointer()
    for step in range(4):
        state["weights"] += 1
        ours.save(state, tmp_path / str(step))
    assert {event.bytes_reused for event in events} == {0}
    assert not _linkable(tmp_path / "3")


def test_what_was_stable_and_changes_again_is_written_and_waits_before_it_is_linked_again(tmp_path: Path) -> None:
    """Saved twice in one step (``best`` and ``last``), weights look stable although they train."""
    state = {"weights": torch.randn(512, 512)}
    ours = dcp.Checkpointer()
    linkable = []
    for step in range(5):
        state["weights"] += 1
        for name in ("best", "last"):
            ours.save(state, tmp_path / f"{name}-{step}")
            linkable.append(_linkable(tmp_path / f"{name}-{step}"))
            other = {"weights": torch.zeros(512, 512)}
            dcp.load(other, tmp_path / f"{name}-{step}")
            assert_same(other, state)
    assert linkable == [False, True, *[False] * 8]


def test_a_resumed_run_reuses_the_checkpoint_that_it_resumed_from(tmp_path: Path, events: list[SaveFinished]) -> None:
    model, optimizer = build()
    dcp.save(_state(model, optimizer), tmp_path / "0")
    model, optimizer = build(seed=1)
    ours = dcp.Checkpointer()
    ours.load(_state(model, optimizer), tmp_path / "0")
    train(model, optimizer)
    ours.save(_state(model, optimizer), tmp_path / "1")
    assert events[1].bytes <= 0.11 * events[0].bytes
    _check_alone(tmp_path / "1", model)


def test_other_weights_than_those_that_were_loaded_are_written(tmp_path: Path, events: list[SaveFinished]) -> None:
    model, optimizer = build()
    dcp.save(_state(model, optimizer), tmp_path / "0")
    ours = dcp.Checkpointer()
    ours.load(_state(model, optimizer), tmp_path / "0")
    other, fresh = build(seed=1)
    ours.save(_state(other, fresh), tmp_path / "1")
    assert events[1].bytes_reused == 0
    _check_alone(tmp_path / "1", other)


def test_a_resumed_run_reuses_a_tensor_that_is_not_contiguous_until_its_last_element_changes(
    tmp_path: Path, events: list[SaveFinished]
) -> None:
    model, weight = nn.Module(), nn.Parameter(torch.randn(1500, 1000).t(), requires_grad=False)
    model.register_parameter("weight", weight)
    dcp.save({"model": model}, tmp_path / "0")
    for change in (0.0, 1.0):
        ours = dcp.Checkpointer()
        ours.load({"model": model}, tmp_path / "0")
        weight[-1, -1] += change
        ours.save({"model": model}, tmp_path / f"after {change}")
        _check_alone(shutil.copytree(tmp_path / f"after {change}", tmp_path / f"{change}" / "alone"), model)
    assert [event.bytes_reused >= weight.nbytes for event in events] == [False, True, False]


def test_an_index_with_other_hashes_than_memory_and_file_links_nothing(
    tmp_path: Path, events: list[SaveFinished]
) -> None:
    model, optimizer = build()
    dcp.save(_state(model, optimizer), tmp_path / "0")
    index = index_file.decode((tmp_path / "0" / INDEX).read_bytes(), dcp_sha(tmp_path / "0"), "the index")
    index.columns["hash"] = index.columns["hash"] + np.uint64(1)
    (tmp_path / "0" / INDEX).write_bytes(index_file.encode(index))
    change_summary(tmp_path / "0", index_sha256=dcp_sha(tmp_path / "0"))
    ours = dcp.Checkpointer(io={"verify": False})
    ours.load({"n": 0}, tmp_path / "0", strict=False)
    ours.save(_state(model, optimizer), tmp_path / "1")
    assert events[1].bytes_reused == 0
    _check_alone(tmp_path / "1", model)


@pytest.mark.parametrize("async_save", [False, True], ids=["blocking", "in the background"])
def test_overwriting_the_base_links_from_it_before_it_is_gone(
    place: Where, events: list[SaveFinished], async_save: bool
) -> None:
    model, optimizer = build()
    ours = dcp.Checkpointer(async_save=async_save)
    for _ in range(3):
        train(model, optimizer)
        ours.save(_state(model, optimizer), place / "last")
    ours.close()
    assert events[2].bytes <= 0.11 * events[0].bytes
    _check_alone(place / "last", model)


def test_with_the_base_deleted_an_older_checkpoint_of_the_same_files_serves(
    place: Where, events: list[SaveFinished]
) -> None:
    model, optimizer = build()
    ours = dcp.Checkpointer()
    for name in ("best", "last"):
        ours.save(_state(model, optimizer), place / name)
    ours.remove(place / "last")
    ours.save(_state(model, optimizer), place / "next")
    assert events[2].bytes_reused > 7 * LAYER
    ours.remove(place / "best")
    ours.remove(place / "next")
    ours.save(_state(model, optimizer), place / "again")
    assert events[3].bytes_reused < LAYER
    _check_alone(place / "again", model)


def test_keep_last_keeps_what_the_newest_needs(tmp_path: Path, events: list[SaveFinished]) -> None:
    model, optimizer = build()
    ours = dcp.Checkpointer(keep_last=1)
    for step in range(3):
        train(model, optimizer)
        ours.save(_state(model, optimizer), tmp_path / str(step), step)
    assert names_in(tmp_path) == ["2"]
    assert events[2].bytes <= 0.11 * events[0].bytes
    _check_alone(tmp_path / "2", model)


def test_a_failed_save_leaves_the_last_committed_one_as_base(tmp_path: Path, events: list[SaveFinished]) -> None:
    model, optimizer = build()
    ours = dcp.Checkpointer()
    ours.save(_state(model, optimizer), tmp_path / "0")
    train(model, optimizer)
    with bad_disk(raising(OSError("the disk is on fire"))), pytest.raises(dcp.SaveFailed, match="on fire"):
        ours.save(_state(model, optimizer), tmp_path / "1")
    assert dcp.verify(tmp_path / "0").ok
    assert is_tidy(tmp_path)
    ours.save(_state(model, optimizer), tmp_path / "1")
    assert events[1].bytes <= 0.11 * events[0].bytes
    _check_alone(tmp_path / "1", model)


def test_a_file_that_somebody_has_written_to_is_not_linked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = build()
    ours = dcp.Checkpointer()
    ours.save(_state(model, optimizer), tmp_path / "0")
    for file in (tmp_path / "0").glob("*.distcp"):
        with open(file, "r+b") as damaged:
            damaged.seek(file.stat().st_size // 2)
            damaged.write(b"oops")
    with caplog.at_level(logging.WARNING, "dcp_plugin"):
        ours.save(_state(model, optimizer), tmp_path / "1")
    assert "written to since" in caplog.text
    _check_alone(tmp_path / "1", model)


def test_a_loaded_checkpoint_whose_bytes_are_not_what_its_hashes_say_is_not_linked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk that forgets, or somebody who wants other weights in the next checkpoint than those in memory."""
    model, optimizer = build()
    for name in ("rotten", "forged"):
        dcp.save(_state(model, optimizer), tmp_path / name)
    flip_byte(max((tmp_path / "rotten").glob("*.distcp"), key=lambda file: file.stat().st_size))
    _forge(tmp_path / "forged", model)
    for name in ("rotten", "forged"):
        caplog.clear()
        ours = dcp.Checkpointer(io={"verify": False})
        ours.load({"n": 0}, tmp_path / name, strict=False)
        with caplog.at_level(logging.WARNING, "dcp_plugin"):
            ours.save(_state(model, optimizer), tmp_path / f"after {name}")
        assert "are not the bytes" in caplog.text
        assert dcp.verify(tmp_path / f"after {name}").ok
        assert_same(_loaded_by_stock(tmp_path / f"after {name}", model), full_state(model.state_dict()))


def _forge(path: Path, model: nn.Module) -> None:
    """Other weights in the place of the frozen ones, under the hashes of the right ones."""
    evil, _ = build(seed=66)
    dcp.save({"model": evil}, path)
    index = index_file.decode((path / INDEX).read_bytes(), dcp_sha(path), str(path / INDEX))
    hashes = index.columns["hash"].copy()
    for key, slot in index.slots.items():
        first, _ = index.places.hashes_of(index.table.chunk_starts[slot])
        right = hashes_in(memory_view(model.get_parameter(key.removeprefix("model.")).detach()))
        hashes[first : first + len(right)] = right
    index.columns["hash"] = hashes
    (path / INDEX).write_bytes(index_file.encode(index))
    change_summary(path, index_sha256=_sha256(path / INDEX))


def test_another_file_system_gets_a_copy_and_that_is_said_once(
    tmp_path: Path, events: list[SaveFinished], caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = build()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as elsewhere:
        if os.stat(elsewhere).st_dev == os.stat(tmp_path).st_dev:
            pytest.skip("needs two file systems")
        ours = dcp.Checkpointer()
        with caplog.at_level(logging.WARNING, "dcp_plugin"):
            for step in range(4):
                ours.save(_state(model, optimizer), (tmp_path if step % 2 else Path(elsewhere)) / str(step))
        assert [event.bytes_reused for event in events[:2]] == [0, 0]
        assert caplog.text.count("hard links") == 1
        assert "Invalid cross-device link" in caplog.text
    _check_alone(tmp_path / "3", model)


def test_a_file_with_as_many_links_as_it_can_have_is_written_anew(tmp_path: Path, events: list[SaveFinished]) -> None:
    model, optimizer = build()
    ours = dcp.Checkpointer()
    ours.save(_state(model, optimizer), tmp_path / "0")
    links = tmp_path / "links"
    links.mkdir()
    try:
        for file in (tmp_path / "0").glob("*.distcp"):
            for number in range(65_000):
                os.link(file, links / f"{file.name}-{number}")
        pytest.skip("this file system has no such limit")
    except OSError:  # of the first file; the others can still be linked
        pass
    ours.save(_state(model, optimizer), tmp_path / "1")
    ours.save(_state(model, optimizer), tmp_path / "2")
    assert events[2].bytes_reused > 7 * LAYER
    _check_alone(tmp_path / "2", model)


def test_without_reuse_nothing_is_linked_or_meant_to_be(tmp_path: Path, events: list[SaveFinished]) -> None:
    model, optimizer = build()
    ours = dcp.Checkpointer(reuse=False)
    for step in range(2):
        ours.save(_state(model, optimizer), tmp_path / str(step))
    assert events[0].bytes == events[1].bytes
    assert not _linkable(tmp_path / "1")


def test_a_few_changed_bytes_do_not_cost_a_file_but_many_do(tmp_path: Path, events: list[SaveFinished]) -> None:
    """A linked file may carry a little that belongs to nobody; what is dead never adds up."""
    model, optimizer = build(layers=40)
    ours = dcp.Checkpointer(io={"threads": 1})
    ours.save(_state(model, optimizer), tmp_path / "0")
    for number in range(10):
        flip_in_memory(model.get_parameter(f"backbone.{number}.weight"), 5)
        ours.save(_state(model, optimizer), tmp_path / str(number + 1))
        on_disk = sum(file.stat().st_size for file in (tmp_path / str(number + 1)).glob("*.distcp"))
        assert on_disk < 1.16 * events[0].bytes
    assert events[1].bytes < 4 * LAYER
    assert sum(event.bytes > 20 * LAYER for event in events[1:]) == 1
    _check_alone(tmp_path / "10", model)


def test_hashes_that_are_no_hashes_are_refused(tmp_path: Path) -> None:
    model, optimizer = build()
    dcp.save(_state(model, optimizer), tmp_path / "0")
    columns = load_file(tmp_path / "0" / INDEX)
    index = index_file.decode((tmp_path / "0" / INDEX).read_bytes(), dcp_sha(tmp_path / "0"), "the index")
    for bad in (
        {"hash": columns["hash"][:-1].copy()},
        {"hash": np.append(columns["hash"], columns["hash"][:1])},
        {"hash": columns["hash"].astype(np.int64)},
        {"frame": columns["frame"][:-1].copy()},
    ):
        index.columns = {**columns, **bad}
        file = tmp_path / "broken.index"
        file.write_bytes(index_file.encode(index))
        with pytest.raises(dcp.CheckpointCorrupt, match=r"hash|differ in length"):
            index_file.decode(file.read_bytes(), _sha256(file), str(file))


def dcp_sha(path: Path) -> str:
    return _sha256(path / INDEX)


def _sha256(file: Path) -> str:
    import hashlib

    return hashlib.sha256(file.read_bytes()).hexdigest()


# Several ranks


@pytest.mark.one_of
@pytest.mark.parametrize(
    ("world_size", "layouts"), [(2, ["ddp", "fsdp1", "fsdp2"]), (4, ["hsdp"])], ids=["2 ranks", "4 ranks"]
)
@on_ranks()
def test_every_layout_writes_a_tenth_from_the_second_save_on(
    tmp_path: Path, world_size: int, layouts: list[str]
) -> None:
    warnings.simplefilter("ignore")
    for layout in layouts:
        root = tmp_path / layout
        with finished_saves() as events:
            model, optimizer = build(layout)
            ours = dcp.Checkpointer()
            for step in range(3):
                train(model, optimizer)
                ours.save(_state(model, optimizer), root / str(step), step)
            ours.close()
            if dist.get_rank() == 0:
                for step in range(2):
                    shutil.rmtree(root / str(step))
                assert dcp.verify(root / "2").ok
            dist.barrier()
            other, fresh = build(layout, seed=3)
            dcp.load(_state(other, fresh), root / "2")
            assert_same(full_state(other.state_dict()), full_state(model.state_dict()))
        written = [sum(gathered(event.bytes)) for event in events]
        assert len(written) == 3 and written[1] <= 0.11 * written[0], layout
        assert written[2] == written[1]


def _resume(path: Path, then: Path) -> tuple[list[int], list[str]]:
    model, optimizer = build("fsdp2", seed=1)
    said = logged()
    ours = dcp.Checkpointer()
    ours.load(_state(model, optimizer), path)
    loaded = full_state(model.state_dict())
    with finished_saves() as events:
        for step in range(3):
            ours.save(_state(model, optimizer), then / str(step))
    ours.close()
    assert dcp.verify(then / "2").ok
    other, fresh = build("fsdp2", seed=2)
    dcp.load(_state(other, fresh), then / "2")
    assert_same(full_state(other.state_dict()), loaded)
    return [event.bytes_reused for event in events], said


def _save_once(path: Path) -> None:
    model, optimizer = build("fsdp2")
    dcp.save(_state(model, optimizer), path)


def test_on_another_number_of_ranks_all_is_written_once_and_linked_again(tmp_path: Path) -> None:
    launch.run(_save_once, 2, tmp_path / "2 ranks")
    told = launch.run(_resume, 3, tmp_path / "2 ranks", tmp_path / "3 ranks")
    assert all(reused[0] == 0 and min(reused[1:]) > 0 for reused, _ in told)
    assert [len(messages) for _, messages in told] == [1, 0, 0]
    assert "other ranks or in another layout" in told[0][1][0]
    told = launch.run(_resume, 3, tmp_path / "3 ranks" / "1", tmp_path / "3 ranks again")
    assert all(min(reused) > 0 and not messages for reused, messages in told)


def _save_and_die(root: Path, victims: list[int]) -> None:
    """The first save is whole; in the second, the victims die when files are linked and some bytes are written."""
    model, optimizer = build("fsdp2")
    ours = dcp.Checkpointer(timeout=20)
    ours.save(_state(model, optimizer), root / "0", step=0)

    def die(event: dcp.events.Event) -> None:
        if isinstance(event, dcp.events.BytesWritten):
            (saving,) = (root / WORKSPACE).glob("*.saving")
            mine = list(saving.glob(f"__{dist.get_rank()}_*.distcp"))
            assert any(file.stat().st_nlink == 2 for file in mine), "killed too early: nothing is linked yet"
            os.kill(os.getpid(), signal.SIGKILL)

    if dist.get_rank() in victims:
        dcp.events.subscribe(die)
    train(model, optimizer)
    with pytest.raises(dcp.RankFailure):
        ours.save(_state(model, optimizer), root / "1", step=1)


@pytest.mark.one_of
@pytest.mark.parametrize("victims", [[0, 1], [1]], ids=["all ranks", "one rank"])
def test_a_save_that_is_killed_between_its_links_harms_no_other_checkpoint(tmp_path: Path, victims: list[int]) -> None:
    launch.run(_save_and_die, 2, tmp_path, victims, killed=victims)
    assert dcp.latest(tmp_path) == tmp_path / "0"
    launch.run(_save_once, 2, tmp_path / "2")
    assert is_tidy(tmp_path)
    assert dcp.verify(tmp_path / "0").ok
    links = {file.stat().st_nlink for file in (tmp_path / "0").glob("*.distcp")}
    assert links == {1}, "what the dead save had linked is gone"
