"""Files of other tools are loaded like our own checkpoints: whatever they are called, into any layout, and each rank
reads only its part."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import _extension

import dcp_plugin as dcp
from dcp_plugin.core.state import gather_module
from dcp_plugin.core.storage.stock import stock_items
from tests.compare import assert_same, full_state, same_bytes
from tests.foreign import without_crcs
from tests.launch import gathered, on_ranks
from tests.layouts import WORLD_SIZE, build, train, whole_state, wrap
from tests.objects import WithExtra

State = dict[str, torch.Tensor]


class Net(nn.Module):
    """Rows that make up nearly all of the bytes, uneven over two ranks; a buffer and a scalar."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.block = nn.Sequential(nn.Linear(512, 1023), nn.LayerNorm(1023))
        self.out = nn.Linear(1023, 513)
        self.register_buffer("steps", torch.tensor(seed))


def _sharded_safetensors(state: State, path: Path) -> None:
    path.mkdir()
    save_torch_state_dict(state, path, max_shard_size="1500KB")
    assert len(list(path.glob("*.safetensors"))) > 1


def _sharded_bin(state: State, path: Path) -> None:
    path.mkdir()
    save_torch_state_dict(state, path, max_shard_size="1500KB", safe_serialization=False)
    assert len(list(path.glob("*.bin"))) > 1


def _hub_snapshot(state: State, path: Path) -> None:
    """In the cache of the hub, a snapshot consists of links."""
    blobs = path.parent / f"{path.name}-blobs"
    _sharded_safetensors(state, blobs)
    path.mkdir()
    for number, blob in enumerate(sorted(blobs.iterdir())):
        target = blob.rename(blobs / f"{number:040x}")
        (path / blob.name).symlink_to(Path("..") / blobs.name / target.name)


def _in_directory(name: str, save: Callable[[State, Path], Any]) -> Callable[[State, Path], None]:
    def write(state: State, path: Path) -> None:
        path.mkdir()
        save(state, path / name)

    return write


def _training(state: State, path: Path) -> None:
    module = Net()
    optimizer = torch.optim.AdamW(module.parameters())
    module.out(module.block(torch.ones(1, 512))).sum().backward()
    optimizer.step()
    torch.save({"model": state, "optimizer": optimizer.state_dict(), "epoch": 3, "args": {"lr": 0.1}}, path)


def _stock(state: dict[str, Any], path: Path) -> None:
    stock.save(state, checkpoint_id=path)


SOURCES: dict[str, tuple[str, Callable[[State, Path], Any]]] = {
    "safetensors": ("safetensors", save_file),
    "safetensors_directory": ("safetensors", _in_directory("model.safetensors", save_file)),
    "safetensors_of_an_adapter": ("safetensors", _in_directory("adapter_model.safetensors", save_file)),
    "safetensors_sharded": ("safetensors", _sharded_safetensors),
    "safetensors_in_the_hub_cache": ("safetensors", _hub_snapshot),
    "safetensors_called.bin": ("safetensors", save_file),
    "torch": ("torch.save", torch.save),
    "torch_called.safetensors": ("torch.save", torch.save),
    "torch_training.pt": ("torch.save", _training),
    "torch_directory": ("torch.save", _in_directory("pytorch_model.bin", torch.save)),
    "torch_sharded": ("torch.save", _sharded_bin),
    "torch_of_ddp": ("torch.save", lambda state, path: torch.save({f"module.{k}": v for k, v in state.items()}, path)),
    "stock": ("stock", lambda state, path: _stock({"model": state}, path)),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("foreign")
    for name, (_, write) in SOURCES.items():
        write(Net(1).state_dict(), root / name)
    return root


def _wanted() -> State:
    return dict(Net(1).state_dict())


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.filterwarnings("ignore:.*module..* for model:UserWarning")
def test_every_source_restores_every_byte(sources: Path, name: str) -> None:
    model = Net(2)
    report = dcp.load({"model": model}, sources / name)
    assert_same(_wanted(), model.state_dict())
    assert not report.missing and not report.unexpected
    assert report.bytes_read <= 1.02 * _nbytes()
    assert dcp.inspect(sources / name).format == SOURCES[name][0]


def _nbytes() -> int:
    return sum(tensor.nbytes for tensor in _wanted().values())


@pytest.mark.one_of
@pytest.mark.parametrize("layout", ["fsdp1", "fsdp2"])
@on_ranks(2)
def test_ranks_read_only_their_rows_of_every_source(sources: Path, layout: str) -> None:
    warnings.filterwarnings("ignore", message=".*for model", category=UserWarning)
    for name in SOURCES:
        model = wrap(layout, Net(2))
        report = dcp.load({"model": model}, sources / name)
        assert_same(_wanted(), full_state(gather_module(model)))
        assert sum(gathered(report.bytes_read)) <= 1.02 * _nbytes(), name


@pytest.mark.parametrize("name", ["safetensors", "torch_training.pt"])
def test_a_partial_load_reads_what_it_selects(sources: Path, name: str) -> None:
    model = Net(2)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    report = dcp.load({"model": model}, sources / name, dcp.PartialLoad(include="model.out.*"))
    now = model.state_dict()
    selected = {key: value for key, value in _wanted().items() if key.startswith("out.")}
    assert_same({**before, **selected}, now)
    assert report.bytes_read <= 1.02 * sum(value.nbytes for value in selected.values())


def test_values_and_optimizers_beside_the_model_are_there(sources: Path) -> None:
    state: dict[str, Any] = {"model": Net(2), "epoch": 0, "args": {}}
    dcp.load(state, sources / "torch_training.pt")
    assert state["epoch"] == 3 and state["args"] == {"lr": 0.1}
    info = dcp.inspect(sources / "torch_training.pt")
    assert {tensor.key.partition(".")[0] for tensor in info.tensors} == {"model", "optimizer"}


@pytest.mark.one_of
@on_ranks(1, 2)
@pytest.mark.parametrize("save", [torch.save, _stock, dcp.save], ids=["torch.save", "stock", "ours"])
def test_a_numbered_optimizer_is_loaded_by_the_order_of_its_parameters(
    tmp_path: Path, world_size: int, save: Callable[..., Any]
) -> None:
    warnings.simplefilter("ignore")
    for stepped in (2, 0):
        plain, trained = build("plain")
        train(plain, trained, stepped)
        path = tmp_path / f"{stepped}"
        if save is not torch.save or dist.get_rank() == 0:
            save({"model": plain.state_dict(), "optim": trained.state_dict()}, path)
        dist.barrier()
        for layout in (name for name, ranks in WORLD_SIZE.items() if ranks == world_size and name != "fsdp1_flat"):
            model, optimizer = build(layout, seed=1)
            report = dcp.load({"model": model, "optim": optimizer}, path)
            assert not report.missing and not report.unexpected
            assert_same(whole_state(plain, trained), whole_state(model, optimizer))


@on_ranks(2)
def test_numbers_do_not_fit_joined_parameters(tmp_path: Path) -> None:
    warnings.simplefilter("ignore")
    plain, trained = build("plain")
    _stock({"model": plain.state_dict(), "optim": trained.state_dict()}, tmp_path / "ck")
    model, optimizer = build("fsdp1_flat", seed=1)
    with pytest.raises(dcp.CheckpointMismatch, match="FSDP1 has joined parameters here"):
        dcp.load({"model": model, "optim": optimizer}, tmp_path / "ck")


@pytest.mark.parametrize(
    ("chosen", "reason"),
    [
        (lambda p: p[::-1], r"number 0 has state of shape \(10, 6\), and out.bias has shape \(1,\)"),
        (lambda p: p[:3], "it has number 7, and the optimizer 3 parameters"),
        (
            lambda p: [{"params": p[:2]}, {"params": p[2:]}],
            r"its groups have \[8\] parameters, and those here \[2, 6\]",
        ),
    ],
    ids=["order", "fewer", "groups"],
)
def test_numbers_that_do_not_fit_are_an_error_that_says_why(tmp_path: Path, chosen: Any, reason: str) -> None:
    plain, trained = build("plain")
    train(plain, trained, 1)
    torch.save({"model": plain.state_dict(), "optim": trained.state_dict()}, tmp_path / "t.pt")
    model, _ = build("plain", seed=1)
    optimizer = torch.optim.AdamW(chosen([*model.parameters()]), lr=0.5)
    before = {**model.state_dict()}, repr(optimizer.state_dict())
    with pytest.raises(dcp.CheckpointMismatch, match=f"has numbers instead of parameter names.*{reason}"):
        dcp.load({"model": model, "optim": optimizer}, tmp_path / "t.pt")
    assert_same(before[0], dict(model.state_dict()))
    assert repr(optimizer.state_dict()) == before[1]


def test_a_file_with_nothing_but_an_optimizer_is_loaded(tmp_path: Path) -> None:
    plain, trained = build("plain")
    train(plain, trained, 1)
    torch.save({"optim": trained.state_dict()}, tmp_path / "t.pt")
    model, optimizer = build("plain", seed=1)
    dcp.load({"model": model, "optim": optimizer}, tmp_path / "t.pt", dcp.PartialLoad(include="optim.*"))
    assert repr(optimizer.state_dict()) == repr(trained.state_dict())


def test_the_only_module_is_found_under_another_name(sources: Path) -> None:
    backbone = Net(2)
    with pytest.warns(UserWarning, match="its only module, 'model', is loaded"):
        dcp.load({"backbone": backbone}, sources / "safetensors")
    assert_same(_wanted(), backbone.state_dict())


def test_several_state_dicts_keep_their_names(tmp_path: Path) -> None:
    one, other = {"w": torch.ones(2)}, {"w": torch.zeros(2)}
    torch.save({"state_dict": one, "ema": other}, tmp_path / "usual")
    assert _keys(tmp_path / "usual") == ["ema.w", "model.w"]
    torch.save({"generator": one, "discriminator": other}, tmp_path / "unusual")
    assert _keys(tmp_path / "unusual") == ["discriminator.w", "generator.w"]
    torch.save({"deep": {"down": {"net": one}}, "rate": torch.tensor(1.0)}, tmp_path / "deep")
    assert _keys(tmp_path / "deep") == ["model.w", "rate"]


def test_the_extra_state_of_a_module_arrives_with_its_tensors(tmp_path: Path) -> None:
    saved, model = (
        WithExtra({"scale": torch.tensor(scale), "history": [torch.full((3,), scale)]}) for scale in (0.5, 1.0)
    )
    torch.save({"net": {f"inner.{key}": value for key, value in saved.state_dict().items()}}, tmp_path / "file")
    dcp.load({"model": nn.ModuleDict({"inner": model})}, tmp_path / "file")
    assert_same(
        {"w": saved.weight.detach(), "s": saved.extra["scale"]}, {"w": model.weight.detach(), "s": model.extra["scale"]}
    )
    assert same_bytes(saved.extra["history"][0], model.extra["history"][0])


def test_tensors_of_an_extra_state_have_their_class_layout_and_shared_memory(tmp_path: Path) -> None:
    ones = torch.ones(3, 4)
    state = {
        "sparse": torch.eye(3).to_sparse(), "parameter": nn.Parameter(ones), "conj": torch.tensor([1 + 1j]).conj(),
        "a": ones, "part": ones[1:, ::2], "empty": torch.empty(0, 3), "size": torch.Size([2]), "tuple": (ones, [ones]),
    }  # fmt: skip
    torch.save(WithExtra(state).state_dict(), tmp_path / "file")
    module = WithExtra(None)
    dcp.load({"model": module}, tmp_path / "file")
    found, expected = module.extra, torch.load(tmp_path / "file", weights_only=True)["_extra_state"]
    assert same_bytes(found["sparse"].to_dense(), torch.eye(3))
    assert type(found["parameter"]) is nn.Parameter
    for key in ("parameter", "conj", "a", "part", "empty"):
        assert same_bytes(found[key].detach().resolve_conj(), expected[key].detach().resolve_conj()), key
    assert found["size"] == torch.Size([2])
    memory = {one.untyped_storage().data_ptr() for one in (found["a"], found["part"], *found["tuple"][1])}
    assert len(memory) == 1, "tensors that shared memory share it"


def _keys(path: Path) -> list[str]:
    return sorted(tensor.key for tensor in dcp.inspect(path).tensors)


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e8m0fnu, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64,
]  # fmt: skip


@pytest.mark.parametrize("save", [save_file, torch.save], ids=["safetensors", "torch.save"])
def test_every_dtype_and_shape_arrives_bit_by_bit(tmp_path: Path, save: Callable[..., Any]) -> None:
    bits = torch.randint(0, 2, (48,), dtype=torch.uint8)  # bits that make a boolean, too
    stored = {str(dtype): bits.view(dtype).clone() for dtype in DTYPES}
    stored |= {"scalar": torch.tensor(-0.0), "none": torch.empty(0, 3), "nan": torch.tensor([float("nan")])}
    if save is torch.save:
        stored["complex128"] = bits.clone().view(torch.complex128)
    save(stored, tmp_path / "file")
    target = {key: torch.zeros_like(value) for key, value in stored.items()}
    dcp.load({"model": target}, tmp_path / "file")
    assert_same(stored, target)


def test_files_that_torch_wrote_without_crcs_are_read_like_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"w": torch.randn(5, 7), "b": torch.randn(3)}
    with without_crcs():
        torch.save({"model": state}, tmp_path / "file.pt")
        stock.save(state, checkpoint_id=tmp_path / "stock")
    assert_same(dcp.read(tmp_path / "file.pt"), {f"model.{key}": value for key, value in state.items()})
    monkeypatch.setattr(stock_items, "tensor_in", None)  # what is not read straight goes through torch.load
    assert_same(dcp.read(tmp_path / "stock"), state)


def test_views_parameters_and_shared_storages_of_torch_save(tmp_path: Path) -> None:
    base = torch.arange(120.0)
    stored = {
        "transposed": base.view(10, 12).t(), "permuted": base.view(4, 5, 6).permute(2, 0, 1), "third": base[5:50:3],
        "expanded": base[7:10].expand(4, 3), "overlapping": base[3:9], "tied": base[3:9], "reshaped": base.view(2, 60),
        "windows": base.unfold(0, 10, 5), "parameter": nn.Parameter(base[1:3]), "column": base.view(10, 12)[:, 4],
    }  # fmt: skip
    torch.save(stored, tmp_path / "file")
    target = {key: torch.zeros(value.shape) for key, value in stored.items()}
    dcp.load({"model": target}, tmp_path / "file")
    assert_same({key: value.detach().contiguous() for key, value in stored.items()}, target)


def test_a_large_transposed_tensor_is_read_in_pieces(tmp_path: Path) -> None:
    stored = torch.arange(9_000_000, dtype=torch.int32).view(3000, 3000).t()
    torch.save({"t": stored, "windows": stored.t().reshape(-1).unfold(0, 5_000_000, 7)[:2]}, tmp_path / "file")
    target = torch.zeros(3000, 3000, dtype=torch.int32)
    windows = torch.zeros(2, 5_000_000, dtype=torch.int32)
    dcp.load({"model": {"t": target, "windows": windows}}, tmp_path / "file")
    assert same_bytes(stored.contiguous(), target)
    assert windows[1, 0] == 7 and windows[1, -1] == 5_000_006


class Tied(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(9, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.embedding.weight


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    """Files of a model with tied weights, each without one of their names."""
    for left_out in ("head.weight", "embedding.weight"):
        save_file({k: v for k, v in Tied(1).state_dict().items() if k != left_out}, tmp_path / left_out)
    return tmp_path


@on_ranks(2)
def test_a_tied_weight_that_is_stored_under_one_of_its_names_is_not_missing(tied: Path) -> None:
    for path in sorted(tied.iterdir()):
        for layout in ("plain", "fsdp2", "fsdp1", "fsdp1_flat"):
            model = wrap(layout, Tied(2), unit="")
            report = dcp.load({"model": model}, path)
            assert len(report.loaded) == 3 and not report.missing
            assert_same(Tied(1).state_dict(), full_state(gather_module(model)))


def test_a_weight_that_was_tied_and_is_no_longer_is_missing(tied: Path) -> None:
    untied = Tied(2)
    untied.head.weight = nn.Parameter(torch.zeros(9, 4))
    with pytest.raises(dcp.CheckpointMismatch, match=r"model\.head\.weight is not in the checkpoint"):
        dcp.load({"model": untied}, tied / "head.weight")


def test_models_of_transformers_are_loaded_from_what_they_save(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=101, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    torch.manual_seed(1)
    saved = GPT2LMHeadModel(config)
    saved.save_pretrained(tmp_path / "one")
    saved.save_pretrained(tmp_path / "shards", max_shard_size="10KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    for path in tmp_path.iterdir():
        torch.manual_seed(2)
        model = GPT2LMHeadModel(config)
        dcp.load({"model": model}, path)
        assert_same(saved.state_dict(), model.state_dict())


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_stock_dcp_loads_them_with_our_reader(sources: Path) -> None:
    state = {"model": Net(2).state_dict()}
    stock.load(state, storage_reader=dcp.ShardedReader(sources / "safetensors_sharded"))
    assert_same(_wanted(), state["model"])


def test_nothing_foreign_is_taken_for_a_committed_checkpoint(sources: Path) -> None:
    root = sources / "torch_directory"
    assert dcp.latest(root) is None and dcp.latest(sources) == sources / "stock"
    assert dcp.resolve_resume("auto", root) is None


def test_verify_says_that_there_are_no_checksums(sources: Path) -> None:
    report = dcp.verify(sources / "safetensors")
    assert report.ok and set(report.unverified) == {f"model.{key}" for key in _wanted()}
    assert "no checksum" in str(report)


def test_steps_of_one_training_have_different_fingerprints(tmp_path: Path) -> None:
    from dcp_plugin import ShardedReader

    for save in (save_file, torch.save):
        for seed in (1, 2):
            save(Net(seed).state_dict(), tmp_path / f"{seed}")
        shutil.copy(tmp_path / "1", tmp_path / "again")
        first, second, again = (ShardedReader(tmp_path / name).fingerprint for name in ("1", "2", "again"))
        assert first != second
        assert first == again


def test_a_transform_that_this_process_lacks_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extensions = [_extension.ZStandard()]
    stock.save({"w": torch.ones(3)}, storage_writer=stock.FileSystemWriter(tmp_path / "ck", _extensions=extensions))
    monkeypatch.setattr(_extension, "zstandard", None)
    monkeypatch.setattr(_extension, "pyzstd", None)
    with pytest.raises(dcp.CheckpointUnreadable, match=rf"{tmp_path}/ck.*stream.zstd.*install the package"):
        dcp.load({"w": torch.zeros(3)}, tmp_path / "ck")
