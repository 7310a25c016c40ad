"""Stock saves into a directory of ours, and a ``.metadata`` comes to lie beside an index that is not of the same save.

What stock saved whole is a checkpoint of stock's, and no other checkpoint of the run is changed by it. Anything else is
damage, and is said to be.
"""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint.metadata import StorageMeta

import dcp_plugin as dcp
from dcp_plugin.checkpointer import Internals
from dcp_plugin.integration.extra_files import is_of_stock_lightning
from tests.compare import assert_same, full_state
from tests.damage import flip_byte
from tests.finetune import build, finished_saves, train
from tests.launch import on_ranks
from tests.places import bytes_in, names_in

pytestmark = pytest.mark.filterwarnings("ignore:Detected an existing checkpoint in .*, overwriting")  # stock says so


def _tensors(seed: int) -> dict[str, torch.Tensor]:
    """Another seed changes what is trained only."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "frozen": torch.arange(300_000.0),
        "trained": torch.randn(5_000, generator=generator),
        "step": torch.tensor(seed),
    }


def _targets() -> dict[str, torch.Tensor]:
    return {key: torch.full_like(value, 9) for key, value in _tensors(0).items()}


def _loaded(path: Path) -> dict[str, torch.Tensor]:
    target = _targets()
    dcp.load({"t": target}, path)
    return target


def _two_linked(root: Path, **options: Any) -> tuple[Path, Path]:
    """Two checkpoints of a run. With ``reuse``, the second has a file of the first."""
    ours = dcp.Checkpointer(**options)
    for step in range(4):
        ours.save({"t": _tensors(step)}, root / str(step), step=step)
    for step in range(2):
        shutil.rmtree(root / str(step))
    return root / "2", root / "3"


def _linked(checkpoint: Path) -> set[str]:
    return {file.name for file in checkpoint.glob("*.distcp") if file.stat().st_nlink > 1}


# What stock saves whole


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("over", ["older", "newer"])
def test_a_save_by_stock_over_ours_is_stocks_and_changes_no_other_checkpoint(
    tmp_path: Path, reuse: bool, over: str
) -> None:
    older, newer = _two_linked(tmp_path, reuse=reuse)
    assert bool(_linked(older)) == reuse
    target, other = (older, newer) if over == "older" else (newer, older)
    before = bytes_in(other)
    theirs = {key: value + 1 for key, value in _tensors(7).items()}
    stock.save({"t": theirs}, checkpoint_id=target)

    assert bytes_in(other) == before
    assert dcp.verify(other).ok
    assert_same(_loaded(other), _tensors(int(other.name)))
    assert_same(_loaded(target), theirs)
    by_stock = _targets()
    stock.load({"t": by_stock}, checkpoint_id=target)
    assert_same(by_stock, theirs)
    info = dcp.inspect(target)
    assert (info.format, info.step, info.world_size) == ("stock", None, None)
    assert dcp.verify(target).unverified
    assert dcp.latest(tmp_path) == target == dcp.resolve_resume("must", tmp_path)
    states = {state.path: state for state in dcp.list_checkpoints(tmp_path)}
    assert states[target].committed and states[target].step is None
    assert states[other].committed and states[other].step == int(other.name)


def test_the_same_tensors_saved_by_stock_are_stocks_too(tmp_path: Path) -> None:
    """Without ``reuse`` the names are the same, and so is every payload: the sizes of the files differ."""
    dcp.save({"t": _tensors(1)}, tmp_path / "ck", step=1, reuse=False)
    stock.save({"t": _tensors(1)}, checkpoint_id=tmp_path / "ck")
    assert dcp.inspect(tmp_path / "ck").format == "stock"
    assert_same(_loaded(tmp_path / "ck"), _tensors(1))


def test_no_file_of_a_save_with_reuse_has_a_name_that_stock_writes(tmp_path: Path) -> None:
    newer = _two_linked(tmp_path)[1]
    stock.save({"t": _tensors(1)}, checkpoint_id=tmp_path / "stock")
    for file in newer.glob("*.distcp"):
        assert not (tmp_path / "stock" / file.name).exists() and "-" in file.name
    names = [{file.name for file in (tmp_path / step).glob("*.distcp")} for step in ("2", "3")]
    assert not names[0] & names[1] and len(names[0] | names[1]) == 4, "each save has names of its own"
    assert [len({name.rpartition("-")[2] for name in of_save}) for of_save in names] == [1, 1]


@on_ranks(2)
def test_two_ranks_of_stock_over_ours_change_no_linked_file(tmp_path: Path) -> None:
    root = tmp_path
    model, optimizer = build("fsdp2")
    ours = dcp.Checkpointer()
    for step in range(2):
        train(model, optimizer)
        ours.save({"model": model, "optim": optimizer}, root / str(step), step)
        if step == 0:
            first = full_state(model.state_dict())
    ours.close()
    rank = dist.get_rank()
    names = [file.name for file in (root / "1").glob(f"__{rank}_*.distcp") if file.stat().st_nlink == 2]
    inodes = {(root / "1" / name).stat().st_ino for name in names}
    before = {file: file.read_bytes() for file in (root / "0").glob("*.distcp") if file.stat().st_ino in inodes}
    assert before
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    stock.save({"model": model.state_dict()}, checkpoint_id=root / "1")
    dist.barrier()
    for file, data in before.items():
        assert file.read_bytes() == data
    for step, expected in (("0", first), ("1", full_state(model.state_dict()))):
        other, _ = build("fsdp2", seed=3)
        dcp.load({"model": other}, root / step)
        assert_same(full_state(other.state_dict()), expected)
    assert dcp.verify(tmp_path / "0").ok
    assert dcp.latest(tmp_path) == tmp_path / "1"
    assert dcp.inspect(tmp_path / "1").format == "stock"


def test_a_sharded_directory_of_lightnings_over_ours_is_lightnings(tmp_path: Path) -> None:
    dcp.save({"t": _tensors(1)}, tmp_path / "ck")
    weight = torch.randn(3)
    stock.save({"state_dict": {"weight": weight}}, checkpoint_id=tmp_path / "ck")
    torch.save({"pytorch-lightning_version": "2.5"}, tmp_path / "ck" / "meta.pt")
    assert dcp.inspect(tmp_path / "ck").format == "lightning"
    assert is_of_stock_lightning(tmp_path / "ck")
    found = {"weight": torch.zeros(3)}
    dcp.load({"model": found}, tmp_path / "ck")
    assert_same(found, {"weight": weight})


@pytest.mark.parametrize("reuse", [True, False])
def test_our_save_over_stocks_over_ours_leaves_nothing_of_either(tmp_path: Path, reuse: bool) -> None:
    path = tmp_path / "ck"
    dcp.save({"t": _tensors(1)}, path, step=1, reuse=reuse)
    stock.save({"t": _tensors(2)}, checkpoint_id=path)
    dcp.save({"t": _tensors(3)}, path, step=3, reuse=reuse)
    assert (dcp.inspect(path).format, dcp.inspect(path).step) == ("dcp_plugin", 3)
    assert_same(_loaded(path), _tensors(3))
    assert {file.name for file in path.glob("*.distcp")} == set(dcp.ShardedReader(path).index.files)


def test_what_was_overwritten_by_stock_is_not_counted_or_deleted_by_keep_last(tmp_path: Path) -> None:
    ours = dcp.Checkpointer(keep_last=2)
    for step in range(3):
        ours.save({"t": _tensors(step)}, tmp_path / str(step), step=step)
        if step == 0:
            stock.save({"t": _tensors(8)}, checkpoint_id=tmp_path / "0")
    ours.save({"t": _tensors(3)}, tmp_path / "3", step=3)
    assert names_in(tmp_path) == ["0", "2", "3"]


def test_what_stock_has_saved_over_is_no_base_to_link_from_and_is_resumed_as_stocks(tmp_path: Path) -> None:
    dcp.save({"t": _tensors(1)}, tmp_path / "a", step=1)
    stock.save({"t": _tensors(2)}, checkpoint_id=tmp_path / "a")
    target = {"t": {key: torch.zeros_like(value) for key, value in _tensors(0).items()}}
    ours = dcp.Checkpointer()
    start = dcp.resume_or_init(target, tmp_path, checkpointer=ours)
    assert (start.how, start.step) == ("resumed", None)
    with finished_saves() as events:
        ours.save(target, tmp_path / "b", step=3)
    assert events[0].bytes_reused == 0
    assert_same(_loaded(tmp_path / "b"), _tensors(2))


# What is no whole checkpoint of either


def _of_stocks_without_its_files(path: Path) -> None:
    stock.save({"t": _tensors(7)}, checkpoint_id=path.parent / "stock")
    shutil.copy(path.parent / "stock" / ".metadata", path)
    shutil.rmtree(path.parent / "stock")


def _cut(path: Path) -> None:
    data = (path / ".metadata").read_bytes()
    (path / ".metadata").write_bytes(data[: len(data) // 2])


def _with_a_lost_file(path: Path) -> None:
    stock.save({"t": _tensors(7)}, checkpoint_id=path)
    (path / "__0_0.distcp").unlink()


def _with_a_cut_file(path: Path) -> None:
    stock.save({"t": _tensors(7)}, checkpoint_id=path)
    with open(path / "__0_0.distcp", "r+b") as file:
        file.truncate(4096)


def _without_a_save_id(path: Path) -> None:
    stock.save({"t": _tensors(7)}, checkpoint_id=path)
    _note(path, StorageMeta())


def _written_anew_for_our_files(path: Path) -> None:
    _note(path, StorageMeta(save_id="another"))


def _note(path: Path, storage_meta: StorageMeta) -> None:
    """Have ``.metadata`` tell of another save."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.storage_meta = storage_meta
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "of another save of ours": (
        lambda path: shutil.copy(path.parent / "2" / ".metadata", path),
        "still the data file|missing",
    ),
    "of stock's, without its files": (_of_stocks_without_its_files, "missing|still the data file|outside its file"),
    "cut": (_cut, "damaged"),
    "flipped": (
        lambda path: flip_byte(path / ".metadata", (path / ".metadata").read_bytes().index(b"t.trained")),
        "same save, but was changed",
    ),
    "with a cut file": (_with_a_cut_file, "outside its file"),
    "with a lost file": (_with_a_lost_file, "missing"),
    "without a save's id": (_without_a_save_id, "has no save_id, or that of this save"),
    "written anew for our files": (_written_anew_for_our_files, "still the data file"),
}


@pytest.mark.one_of("reuse")
@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("damage", DAMAGES)
def test_any_other_metadata_beside_our_index_is_damage(
    tmp_path: Path, reuse: bool, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    older, newer = _two_linked(tmp_path, reuse=reuse)
    make, words = DAMAGES[damage]
    make(newer)
    for look in (dcp.inspect, dcp.verify, _loaded):
        with pytest.raises(dcp.CheckpointCorrupt, match=rf"\.metadata is not the one .*({words}).* delete dcp_plugin"):
            look(newer)
    assert dcp.latest(tmp_path) == older
    assert f"passing over {newer}" in caplog.text or not dcp.list_checkpoints(tmp_path)[-1].committed
    shutil.rmtree(older)
    with pytest.raises(dcp.CheckpointCorrupt, match="none that can be loaded"):
        dcp.resolve_resume("auto", tmp_path)


def test_the_way_out_that_the_error_names_leads_out(tmp_path: Path) -> None:
    dcp.save({"t": _tensors(1)}, tmp_path / "ck")
    _written_anew_for_our_files(tmp_path / "ck")
    for name in ("dcp_plugin.index", "dcp_plugin.json"):
        (tmp_path / "ck" / name).unlink()
    assert_same(_loaded(tmp_path / "ck"), _tensors(1))


@pytest.mark.parametrize("scale", [1, 2], ids=["shorter", "longer"])
def test_in_the_middle_of_a_save_by_stock_ours_is_untouched(tmp_path: Path, scale: int) -> None:
    """It is complete until stock has written its ``.metadata``: none of its files has a name of stock's."""
    theirs = {key: value.repeat(scale) for key, value in _tensors(7).items()}
    stock.save({"t": theirs}, checkpoint_id=tmp_path / "stock")
    data = (tmp_path / "stock" / "__0_0.distcp").read_bytes()
    shutil.rmtree(tmp_path / "stock")
    for name in ("True", "False"):
        path = tmp_path / name
        dcp.save({"t": _tensors(1)}, path, io={"threads": 1}, reuse=name == "True")
        (path / "__0_0.distcp").write_bytes(data)
        assert_same(_loaded(path), _tensors(1))
    assert dcp.latest(tmp_path) == tmp_path / "False"


def test_what_another_tool_saves_over_a_view_of_ours_is_told(tmp_path: Path) -> None:
    """As Accelerate does without this package, which looks for the model in a folder below."""
    path, state = tmp_path / "c", _tensors(0)
    checkpointer = dcp.Checkpointer()
    Internals(checkpointer).save({"model": state}, path, views={"pytorch_model_fsdp_0": {"model": "model"}})
    checkpointer.close()
    assert dcp.latest(tmp_path) == path
    stock.save({"model": _tensors(1)}, checkpoint_id=path / "pytorch_model_fsdp_0")
    assert dcp.latest(tmp_path) is None
    with pytest.raises(dcp.CheckpointCorrupt, match="another tool has saved over pytorch_model_fsdp_0"):
        dcp.load({"model": _tensors(2)}, path)
    found = _targets()
    stock.load({"model": found}, checkpoint_id=path / "pytorch_model_fsdp_0")
    assert_same(found, _tensors(1))
