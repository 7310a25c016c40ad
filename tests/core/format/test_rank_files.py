"""A folder of rank files, as verl and Accelerate write them, is one checkpoint of the full tensors."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._tensor import _rebuild_from_type_v2
from torch._utils import _rebuild_wrapper_subclass
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardedStateDictConfig, StateDictType
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

import dcp_plugin as dcp
from dcp_plugin.core.paths import as_path
from tests import launch
from tests.commands import invoke
from tests.compare import assert_same, same_bytes
from tests.foreign import without_crcs
from tests.launch import on_ranks
from tests.layouts import WORLD_SIZE, build, train, whole_state, wrap
from tests.object_server import Bucket
from tests.objects import PickledAs, attack
from tests.places import copy_folder

LAYOUTS = ("fsdp2", "fsdp2@3", "fsdp2_hsdp", "tp", "fsdp2_tp", "fsdp1_hsdp", "fsdp1")


def _save_as_verl(folder: Path, **state: Any) -> None:
    """Write what FSDPCheckpointManager of verl 0.4 to 0.6 writes."""
    folder.mkdir(exist_ok=True)
    for name, value in state.items():
        torch.save(value, folder / f"{name}_world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt")
    dist.barrier()


def _model_state(layout: str, model: nn.Module) -> dict[str, Any]:
    if not layout.startswith("fsdp1"):
        return model.state_dict()
    with FullyShardedDataParallel.state_dict_type(
        model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(offload_to_cpu=True)
    ):
        return model.state_dict()


def _train_and_save(root: Path, layout: str) -> None:
    warnings.simplefilter("ignore")
    model, optimizer = build(layout)
    train(model, optimizer, 2)
    extra = {"lr_scheduler": {"last_epoch": 2}, "rng": {"cpu": torch.full((3,), dist.get_rank())}}
    _save_as_verl(root / layout, model=_model_state(layout, model), optim=optimizer.state_dict(), extra_state=extra)
    state = whole_state(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(state, root / f"{layout}.pt")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ranks")
    for layout in LAYOUTS:
        launch.run(_train_and_save, WORLD_SIZE[layout], root, layout)
    return root


def _expected(root: Path, layout: str, name: str) -> dict[str, Any]:
    state = torch.load(root / f"{layout}.pt", weights_only=True)
    return {key: value for key, value in state.items() if key.startswith(f"{name}.")}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_files_of_all_ranks_have_every_byte_of_the_full_tensors(root: Path, layout: str) -> None:
    assert_same(_expected(root, layout, "model"), dcp.read(root / layout, "model.*"))
    assert dcp.inspect(root / layout).format == "torch.save"


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if not layout.startswith("fsdp1")])
def test_the_optimizer_is_loaded_by_the_numbers_of_its_parameters(root: Path, layout: str) -> None:
    model, optimizer = build("plain", seed=1)
    report = dcp.load({"model": model, "optim": optimizer}, root / layout)
    assert not report.missing and not report.unexpected
    expected = torch.load(root / f"{layout}.pt", weights_only=True)
    assert_same(expected, whole_state(model, optimizer))


@pytest.mark.parametrize("layout", ["fsdp1", "fsdp1_hsdp"])
def test_flat_shards_of_an_optimizer_are_refused_and_the_model_beside_them_loads(root: Path, layout: str) -> None:
    model, optimizer = build("plain", seed=1)
    with pytest.raises(dcp.CheckpointMismatch, match=r"optim\.state\..* flat shards of FSDP1.*exclude=.optim"):
        dcp.load({"model": model, "optim": optimizer}, root / layout)
    dcp.load({"model": model}, root / layout)
    assert_same(_expected(root, layout, "model"), {f"model.{key}": value for key, value in model.state_dict().items()})


@on_ranks(3)
def test_other_ranks_warm_start_from_it_and_read_only_their_part(root: Path) -> None:
    model = wrap("fsdp2@3", build("plain", seed=1)[0])
    dcp.resume_or_init({"model": model}, root / "run", init_from=root / "fsdp2")
    found = {f"model.{key}": _full(value) for key, value in model.state_dict().items()}
    assert_same(_expected(root, "fsdp2", "model"), found)


def _full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def test_values_that_differ_between_ranks_are_those_of_each_rank(root: Path) -> None:
    state = {"lr_scheduler": {"last_epoch": 0}, "rng": dcp.PerRank({"cpu": torch.zeros(3, dtype=torch.int64)})}
    dcp.load(state, root / "fsdp2")
    assert state["lr_scheduler"]["last_epoch"] == 2
    assert sorted(dcp.read(root / "fsdp2", "rng.*")) == ["rng.0.cpu", "rng.1.cpu"]


def _save_placed(folder: Path, mesh_shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", mesh_shape)
    whole = _whole()
    placements = [Shard(0), Shard(1), Replicate()]
    state = {
        f"{key}.{number}": distribute_tensor(value, mesh, [*[Replicate()] * (len(mesh_shape) - 1), placement])
        for key, value in whole.items()
        for number, placement in enumerate(placements)
    }
    _save_as_verl(folder, model=state)


def _whole() -> dict[str, torch.Tensor]:
    rows = torch.arange(35.0).reshape(5, 7)
    return {"w": rows, "transposed": rows.t(), "small": torch.ones(1, 2, dtype=torch.bfloat16), "none": rows[:0]}


@pytest.mark.parametrize("mesh_shape", [(2,), (3,), (2, 2)], ids=str)
def test_uneven_shards_of_every_dimension_and_copies_arrive_bit_by_bit(
    tmp_path: Path, mesh_shape: tuple[int, ...]
) -> None:
    launch.run(_save_placed, torch.Size(mesh_shape).numel(), tmp_path / "ck", mesh_shape)
    found = dcp.read(tmp_path / "ck")
    expected = {f"model.{key}.{number}": value for key, value in _whole().items() for number in range(3)}
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert same_bytes(value.contiguous(), found[key].contiguous()), key
    model = {"transposed.1": torch.zeros(7, 5)}
    dcp.load({"model": model}, tmp_path / "ck", dcp.PartialLoad(include="model.transposed.1"))
    assert same_bytes(model["transposed.1"], _whole()["transposed"].contiguous())


def _save_drifted(folder: Path) -> None:
    copied = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Replicate()])
    copied.to_local().add_(dist.get_rank())
    _save_as_verl(folder, model={"equal": distribute_tensor(torch.ones(4), copied.device_mesh), "w": copied})


def test_copies_that_have_drifted_are_named_and_the_lowest_rank_counts(tmp_path: Path) -> None:
    launch.run(_save_drifted, 2, tmp_path / "ck")
    with pytest.warns(UserWarning, match=r"copies of shards differ between ranks.*: model\.w$"):
        found = dcp.read(tmp_path / "ck", "model.w")
    assert found["model.w"].tolist() == [1.0] * 4


@pytest.fixture(scope="module")
def placed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("placed")
    launch.run(_save_placed, 2, folder / "ck", (2,))
    launch.run(_save_placed, 3, folder / "other", (3,))
    return folder


def test_a_missing_rank_is_named(placed: Path, tmp_path: Path) -> None:
    shutil.copytree(placed / "other", tmp_path / "ck")
    (tmp_path / "ck" / "model_world_size_3_rank_2.pt").unlink()
    with pytest.raises(dcp.CheckpointCorrupt, match=r"file of rank 2 is missing beside model_world_size_3_rank_0\.pt"):
        dcp.inspect(tmp_path / "ck")


def test_ranks_that_contradict_each_other_are_both_named(placed: Path, tmp_path: Path) -> None:
    shutil.copytree(placed / "ck", tmp_path / "ck")
    stray = placed / "other" / "model_world_size_3_rank_1.pt"
    shutil.copy(stray, tmp_path / "ck")
    with pytest.raises(dcp.CheckpointMismatch, match=r"size_2_rank_\d.pt and .*size_3_rank_1.pt|size_3.* and .*size_2"):
        dcp.inspect(tmp_path / "ck")
    (tmp_path / "ck" / stray.name).rename(tmp_path / "ck" / "model_world_size_2_rank_1.pt")
    with pytest.raises(dcp.CheckpointCorrupt, match="file of rank 2 is missing"):
        dcp.inspect(tmp_path / "ck")


def test_two_files_of_one_rank_do_not_fill_a_tensor(placed: Path, tmp_path: Path) -> None:
    shutil.copytree(placed / "ck", tmp_path / "ck")
    files = sorted((tmp_path / "ck").iterdir())
    shutil.copy(files[0], files[1])
    with pytest.raises(dcp.CheckpointCorrupt, match=r"shards of model\.w\.0 .* do not fill its shape \(5, 7\)"):
        dcp.inspect(tmp_path / "ck")


def test_one_of_the_files_is_refused_with_the_name_of_the_folder(placed: Path) -> None:
    with pytest.raises(dcp.CheckpointNotFound, match=f"shards of rank 1 alone. Name the directory, {placed / 'ck'}"):
        dcp.inspect(placed / "ck" / "model_world_size_2_rank_1.pt")


def _save_odd(folder: Path, placement: Any) -> None:
    local = torch.full((2, 2), float(dist.get_rank()))
    placed = DTensor.from_local(local, init_device_mesh("cpu", (2,)), [placement])
    _save_as_verl(folder, model={"w": placed, "local": local, "same": torch.ones(2)})


def test_a_plain_tensor_that_differs_is_refused_when_it_is_asked_for(tmp_path: Path) -> None:
    launch.run(_save_odd, 2, tmp_path, Shard(0))
    assert sorted(dcp.read(tmp_path, "model.same")) == ["model.same"]
    with pytest.raises(dcp.CheckpointMismatch, match=r"model\.local .*differs between model_w.*_0\.pt and model_w"):
        dcp.load({"model": {"local": torch.zeros(2, 2)}}, tmp_path, dcp.PartialLoad(include="model.local"))


def test_a_summand_is_refused(tmp_path: Path) -> None:
    launch.run(_save_odd, 2, tmp_path, Partial())
    with pytest.raises(dcp.CheckpointCorrupt, match=r"model\.w is a DTensor that is .*of another kind"):
        dcp.inspect(tmp_path)


def _dtensor(spec: Any) -> Any:
    """A DTensor whose notes are those of the author of a file."""
    args = (DTensor, torch.float32, (4, 2), (2, 1), 0, torch.strided, torch.device("cpu"), False)
    state = (None, {"_local_tensor": torch.ones(2, 2), "_spec": PickledAs(DTensorSpec, (), spec)})
    return PickledAs(_rebuild_from_type_v2, (_rebuild_wrapper_subclass, DTensor, args, state))


def _spec(mesh: Any = (2,), at: Any = (0,), dim: Any = 0, shape: Any = (4, 2)) -> dict[str, Any]:
    of_mesh = {"mesh": torch.zeros(mesh, dtype=torch.int32) if isinstance(mesh, tuple) else mesh}
    return {
        "mesh": PickledAs(DeviceMesh, (), {**of_mesh, "_coordinate_on_dim": at}),
        "placements": (PickledAs(Shard, (), {"dim": dim}),),
        "tensor_meta": PickledAs(TensorMeta, (shape, (2, 1), torch.float32)),
    }


def _write(folder: Path, *ranks: Any) -> None:
    for rank, value in enumerate(ranks):
        torch.save({"w": value}, folder / f"model_world_size_{len(ranks)}_rank_{rank}.pt")


@pytest.mark.parametrize(
    "spec",
    [
        _spec(at=(-1,)), _spec(at=(2,)), _spec(at=(0, 0)), _spec(at="0"), _spec(at=5), _spec(dim=7), _spec(dim=None),
        _spec(mesh=(0,)), _spec(mesh="x"), _spec(shape=(10**30, 2)), _spec(shape=(-4, 2)), _spec(shape=(4,)), {}, None,
    ],
)  # fmt: skip
def test_notes_that_lie_are_damage_and_load_nothing(tmp_path: Path, spec: Any) -> None:
    _write(tmp_path, _dtensor(spec), _dtensor(spec))
    with pytest.raises((dcp.CheckpointCorrupt, dcp.CheckpointMismatch), match=r"model\.w"):
        dcp.read(tmp_path)


def test_nothing_distributed_is_made_and_nothing_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for cls in (DeviceMesh, DTensorSpec, DTensor):
        monkeypatch.setattr(cls, "__setstate__", None, raising=False)
    _write(tmp_path, _dtensor(_spec()), _dtensor(_spec(at=(1,))))
    assert same_bytes(dcp.read(tmp_path)["model.w"], torch.ones(4, 2))
    _write(tmp_path, attack(tmp_path / "owned"), torch.ones(1))
    with pytest.raises(dcp.UnsafeCheckpoint, match="mkdir"):
        dcp.load({"model": {"w": torch.zeros(1)}}, tmp_path)
    assert not (tmp_path / "owned").exists()


def test_copies_are_compared_where_torch_wrote_no_checksums(tmp_path: Path) -> None:
    with without_crcs():
        _write(tmp_path, torch.ones(3), torch.zeros(3))
    with pytest.raises(dcp.CheckpointMismatch, match="differs between"):
        dcp.load({"model": {"w": torch.zeros(3)}}, tmp_path)


def test_they_are_imported_and_exported_from_a_bucket_too(placed: Path, tmp_path: Path, bucket: Bucket) -> None:
    copy_folder(placed / "ck", as_path(bucket.url) / "ck")
    result = invoke("import", f"{bucket.url}/ck", tmp_path / "dcp")
    assert result.exit_code == 0, result.stderr
    dcp.export(placed / "ck", tmp_path / "file.pt", format="torch")
    expected = dcp.read(placed / "ck")
    assert_same(expected, dcp.read(tmp_path / "dcp"))
    exported = torch.load(tmp_path / "file.pt", weights_only=True)["model"]
    assert_same(expected, {f"model.{key}": value for key, value in exported.items()})
