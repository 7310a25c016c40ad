"""``export`` and ``import``: every byte arrives, readers of each format open it; an output is whole or not there."""

from __future__ import annotations

import importlib
import io
import json
import os
import shutil
import signal
import struct
import subprocess
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.fsdp import fully_shard

import dcp_plugin as dcp
from dcp_plugin.core.format import torch_archive
from dcp_plugin.core.media.objects.client import client_of
from dcp_plugin.core.paths import as_path
from dcp_plugin.core.tensors import _torch
from tests import programs
from tests.commands import invoke
from tests.compare import assert_same, same_tree
from tests.damage import flip
from tests.launch import on_ranks
from tests.layouts import WORLD_SIZE, build, train, whole_state
from tests.object_server import Bucket
from tests.places import is_tidy, names_in

TENSORS = {
    "f32": torch.randn(7, 300),
    "bf16": torch.randn(5, 7, 3).bfloat16(),
    "f8": torch.randn(9).to(torch.float8_e4m3fn),
    "u16": torch.tensor([1, 60000], dtype=torch.uint16),
    "bool": torch.tensor([True, False]),
    "complex": torch.randn(3, dtype=torch.complex64),
    "scalar": torch.tensor(-0.0),
    "nan": torch.tensor([float("nan"), float("inf")]),
    "empty": torch.empty(0, 3),
    "turned": torch.randn(4, 5).t(),
    "odd.name/../é": torch.randn(1),
}
VALUES = {
    "n": [1, "b"],
    "list": [torch.ones(3), {"u": 2}],
    "tuple": (torch.zeros(2), 3),
    "none": {},
    5: {"x": torch.ones(1)},
}


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 100), nn.BatchNorm1d(100), nn.Linear(100, 7).bfloat16())


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("export") / "ck"
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    model[0](torch.ones(4, 30)).sum().backward()
    optimizer.step()
    dcp.save({"model": model, "optim": optimizer, "x": TENSORS, "v": VALUES}, path, step=7)
    return path


def test_safetensors_have_the_module_byte_for_byte(path: Path, tmp_path: Path) -> None:
    report = dcp.export(path, tmp_path / "m.safetensors", "safetensors")
    assert_same(load_file(tmp_path / "m.safetensors"), dict(_model_state(path)))
    assert (report.tensors, report.values, report.files) == (9, 0, ["m.safetensors"])
    assert "optim.state.0.weight.step" in report.left_out
    several = dcp.export(path, tmp_path / "several", "safetensors", max_shard_size="5KB")
    index = json.loads((tmp_path / "several/model.safetensors.index.json").read_text())
    found = {name: load_file(tmp_path / "several" / file)[name] for name, file in index["weight_map"].items()}
    assert_same(found, dict(_model_state(path)))
    assert sorted(several.files) == sorted(os.listdir(tmp_path / "several"))


def _model_state(path: Path) -> dict[str, torch.Tensor]:
    return {key.removeprefix("model."): value for key, value in dcp.read(path, "model.*").items()}


def test_every_dtype_that_safetensors_name_arrives(path: Path, tmp_path: Path) -> None:
    dcp.export(path, tmp_path / "x.safetensors", "safetensors", include="x.*", rename={"x.": ""})
    assert_same(load_file(tmp_path / "x.safetensors"), TENSORS)


def test_a_torch_file_is_what_torch_save_would_have_written(path: Path, tmp_path: Path) -> None:
    dcp.export(path, tmp_path / "t.pt", "torch", include=["x.*", "v.*"])
    made = (tmp_path / "t.pt").read_bytes()
    state = torch.load(io.BytesIO(made), weights_only=True)
    contiguous = {name: tensor.contiguous() for name, tensor in TENSORS.items()}
    assert same_tree(state, {"x": contiguous, "v": VALUES})
    assert zipfile.ZipFile(tmp_path / "t.pt").testzip() is None
    written = io.BytesIO()
    torch.save({"x": contiguous, "v": VALUES}, written)
    data, other = (
        written.getvalue(),
        b"0" * 40,
    )  # another identifier, which torch makes of checksums in an order of its own
    own = zipfile.ZipFile(written).read("archive/.data/serialization_id")
    checksum = [struct.pack("<I", zlib.crc32(one)) for one in (own, other)]
    assert made == data.replace(own, other).replace(*checksum)


@pytest.mark.one_of
@on_ranks(1, 2, 4)
def test_a_script_without_us_goes_on_from_the_torch_file_of_any_layout(tmp_path: Path, world_size: int) -> None:
    warnings.simplefilter("ignore")
    for layout in (name for name, ranks in WORLD_SIZE.items() if ranks == world_size):
        model, optimizer = build(layout)
        train(model, optimizer, 2)
        dcp.save({"model": model, "optim": optimizer}, tmp_path / layout)
        dcp.export(tmp_path / layout, tmp_path / f"{layout}.pt", "torch")
        expected = whole_state(model, optimizer)
        checkpoint = torch.load(tmp_path / f"{layout}.pt")
        plain, fresh = build("plain", seed=1)
        assert checkpoint["optim"].keys() == fresh.state_dict().keys()
        plain.load_state_dict(checkpoint["model"])
        fresh.load_state_dict(checkpoint["optim"])
        assert_same(expected, whole_state(plain, fresh))


def _script(groups: int, frozen: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """As nanoGPT has it: matrices decay, vectors do not. Of one group, parameters in another order than the model's."""
    model = _model()
    model[0].weight.requires_grad = not frozen
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices, vectors = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() == 1]
    decay = {"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}
    return model, torch.optim.AdamW(decay if groups == 2 else trained[::-1], lr=0.01, betas=(0.8, 0.9))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model[1](model[0](torch.ones(4, 30) * torch.arange(4)[:, None])).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_an_optimizer_goes_on_from_a_torch_file_as_from_its_own_state(
    tmp_path: Path, groups: int, frozen: bool
) -> None:
    model, optimizer = _script(groups, frozen)
    _step(model, optimizer)
    optimizer.state[model[0].bias]["more"] = {"a": [1, torch.ones(2)]}
    dcp.save({"model": model, "opts": {"gen": optimizer}}, tmp_path / "ck")
    dcp.export(tmp_path / "ck", tmp_path / "t.pt", "torch", rename={"opts.": "a.b."})
    checkpoint = torch.load(tmp_path / "t.pt")
    other, resumed = _script(groups, frozen)
    other.load_state_dict(checkpoint["model"])
    resumed.load_state_dict(checkpoint["a"]["b"]["gen"])
    assert repr(resumed.state_dict()) == repr(optimizer.state_dict())
    for one in ((model, optimizer), (other, resumed)):
        _step(*one)
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    assert repr(resumed.state_dict()) == repr(optimizer.state_dict())


def test_an_optimizer_whose_order_is_not_known_keeps_its_names_and_a_note_says_so(tmp_path: Path) -> None:
    model, optimizer = _script(1, frozen=False)
    _step(model, optimizer)
    dcp.save({"model": model, "optim": optimizer}, tmp_path / "ck", stock_aliases=False)
    report = dcp.export(tmp_path / "ck", tmp_path / "t.pt", "torch")
    assert "'optim' has names in place of numbers" in str(report)
    stored = dcp.read(tmp_path / "ck", "optim.*")
    assert same_tree(torch.load(tmp_path / "t.pt")["optim"], {key[6:]: value for key, value in stored.items()})


@pytest.mark.long
def test_offsets_beyond_4_gib_are_where_torch_writes_them(tmp_path: Path) -> None:
    tree = {
        "a": torch.empty(5 << 30, dtype=torch.uint8),
        "b": torch.empty(3),
        "c": torch.empty(1 << 32, dtype=torch.uint8),
    }
    with torch.serialization.skip_data():
        torch.save(tree, tmp_path / "archive.pt")
    theirs = zipfile.ZipFile(tmp_path / "archive.pt").infolist()
    before, storages = _torch.pickled_parts(tree)
    sizes = [(name, len(data)) for name, data in before.items()]
    sizes += [(name, storage.nbytes()) for name, storage in storages.items()]
    ours = torch_archive.records([*sizes, ("version", 2), (".data/serialization_id", 40)])
    assert [(one.name, one.offset, one.size) for one in ours] == [
        (one.filename.removeprefix("archive/"), one.header_offset, one.file_size) for one in theirs
    ]
    end = ours[-1].end + len(torch_archive.directory(ours, [0] * len(ours)))
    assert end == (tmp_path / "archive.pt").stat().st_size


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_checkpoint_that_is_laid_out_anew_has_the_same_bytes(path: Path, tmp_path: Path, ranks: int) -> None:
    report = dcp.export(path, tmp_path / "d", "dcp", ranks=ranks)
    assert report.left_out == []
    assert dcp.verify(tmp_path / "d").ok
    there, made = dcp.read(path), dcp.read(tmp_path / "d")
    assert list(there) == list(made) and same_tree(there, made)
    info = dcp.inspect(tmp_path / "d")
    assert (info.world_size, info.step) == (ranks, 7)
    model = _model()
    dcp.load({"model": model, "optim": torch.optim.AdamW(model.parameters())}, tmp_path / "d")
    assert_same(model.state_dict(), _model_state(path))


def test_stock_reads_it(path: Path, tmp_path: Path) -> None:
    dcp.export(path, tmp_path / "d", "dcp", ranks=2, include=["model.*", "v.n"])
    state: dict[str, Any] = {"model": {key: torch.zeros_like(value) for key, value in _model_state(path).items()}}
    stock.load(state, checkpoint_id=tmp_path / "d", no_dist=True)
    assert_same(state["model"], _model_state(path))
    dcp_to_torch_save(tmp_path / "d", tmp_path / "s.pt")
    found = torch.load(tmp_path / "s.pt", weights_only=True)
    assert_same(found["model"], _model_state(path))
    assert found["v"]["n"] == [1, "b"]


def test_what_others_wrote_becomes_a_checkpoint(path: Path, tmp_path: Path) -> None:
    dcp.export(path, tmp_path / "m.safetensors", "safetensors")
    dcp.export(path, tmp_path / "m.pt", "torch", include="model.*", rename={"model.": ""})
    assert_same(torch.load(tmp_path / "m.pt", weights_only=True), _model_state(path))
    for source in ("m.safetensors", "m.pt"):
        result = invoke("import", tmp_path / source, tmp_path / f"{source}.ck", "--json")
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["export"]["tensors"] == 9
        model = _model()
        dcp.load({"model": model}, tmp_path / f"{source}.ck")
        assert_same(model.state_dict(), _model_state(path))


def test_tensors_are_converted_and_whole_numbers_are_not(path: Path, tmp_path: Path) -> None:
    dcp.export(path, tmp_path / "m.safetensors", "safetensors", dtype="bfloat16")
    dcp.export(path, tmp_path / "ck", "dcp", dtype="bfloat16", include="model.*")
    expected = {key: one.bfloat16() if one.is_floating_point() else one for key, one in _model_state(path).items()}
    assert_same(load_file(tmp_path / "m.safetensors"), expected)
    assert_same(_model_state(tmp_path / "ck"), expected)


def test_what_is_renamed_stays_nested(path: Path, tmp_path: Path) -> None:
    dcp.export(path, tmp_path / "t.pt", "torch", include="v.*", rename={"v.": "a.b.", "v.list.": "rest."})
    rest = {key: value for key, value in VALUES.items() if key != "list"}
    assert same_tree(torch.load(tmp_path / "t.pt"), {"a": {"b": rest}, "rest": VALUES["list"]})


@on_ranks(2)
def test_each_rank_writes_some_of_the_files(tmp_path: Path) -> None:
    root = tmp_path
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    whole = {key: value.clone() for key, value in model.state_dict().items()}
    for value in whole.values():
        dist.broadcast(value, 0)
    model.load_state_dict(whole)
    fully_shard(model)
    dcp.save({"model": model}, root / "ck")
    reports = [
        dcp.export(root / "ck", root / "hf", "safetensors", max_shard_size=100),
        dcp.export(root / "ck", root / "again", "dcp", ranks=3),
        dcp.export(root / "ck", root / "t.pt", "torch"),
    ]
    for report in reports:
        assert (report.tensors, report.nbytes) == (4, 4 * (48 + 8 + 24 + 3))
    files = [load_file(file) for file in sorted((root / "hf").glob("*.safetensors"))]
    assert len(files) > 2
    assert_same({key: value for file in files for key, value in file.items()}, whole)
    assert_same(torch.load(root / "t.pt", weights_only=True)["model"], whole)
    assert_same(_model_state(root / "again"), whole)
    with pytest.raises(dcp.CheckpointError, match="exists"):
        dcp.export(root / "ck", root / "hf", "safetensors")
    assert names_in(root) == ["again", "ck", "hf", "t.pt"]


@on_ranks(2)
def test_an_export_on_one_rank_names_the_ranks_that_do_not_call_it(tmp_path: Path) -> None:
    export = importlib.import_module("dcp_plugin.tools.export")
    export._PATIENCE = 0.5
    dcp.save({"model": nn.Linear(2, 2)}, tmp_path / "step-1")
    if dist.get_rank() == 0:
        with pytest.raises(dcp.RankFailure, match="rank 1; does every rank call export"):
            dcp.export(tmp_path / "step-1", tmp_path / "model.safetensors", format="safetensors")
    dist.barrier()
    assert not (tmp_path / "model.safetensors").exists()


def test_from_a_bucket_and_into_one(path: Path, tmp_path: Path, bucket: Bucket) -> None:
    for made_as, name in [
        ("dcp", "ck"),
        ("torch", "t.pt"),
        ("safetensors", "m.safetensors"),
        ("safetensors", "folder"),
    ]:
        result = invoke("export", path, f"{bucket.url}/{name}", "--format", made_as)
        assert result.exit_code == 0, result.output
    assert same_tree(dcp.read(f"{bucket.url}/ck"), dcp.read(path))
    for name in ("m.safetensors", "folder", "t.pt"):
        back = dcp.read(f"{bucket.url}/{name}", exclude=[] if name != "t.pt" else ["optim.*", "v.*", "x.*"])
        assert_same({key.removeprefix("model."): one for key, one in back.items()}, _model_state(path))
    dcp.export(f"{bucket.url}/ck", tmp_path / "m.safetensors", "safetensors")
    assert_same(load_file(tmp_path / "m.safetensors"), _model_state(path))
    again = invoke("export", path, f"{bucket.url}/t.pt", "--format", "torch")
    assert (again.exit_code, "exists" in again.stderr) == (3, True)
    assert bucket.unfinished_uploads() == []


@pytest.mark.parametrize("name", ["folder", "m.safetensors"])
def test_an_export_into_a_bucket_that_fails_deletes_only_what_it_has_written(
    path: Path, bucket: Bucket, name: str
) -> None:
    out: Any = as_path(f"{bucket.url}/{name}")
    other = out / "notes.txt"

    def fail_at_the_end(done: int, total: int) -> None:
        client_of(out).put(other.key, b"of another job")
        if done == total:
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        dcp.export(path, out, "safetensors", max_shard_size="1KB", progress=fail_at_the_end)
    assert [found.key for found in client_of(out).below("")] == [other.key]


# What goes wrong


FORMATS = [("torch", "t.pt"), ("safetensors", "m.safetensors"), ("safetensors", "m"), ("hf", "hf"), ("dcp", "d")]


@pytest.mark.parametrize(("made_as", "name"), FORMATS)
def test_a_damaged_source_leaves_nothing(path: Path, tmp_path: Path, made_as: str, name: str) -> None:
    source = shutil.copytree(path, tmp_path / "source")
    largest = max(dcp.inspect(source).tensors, key=lambda tensor: tensor.nbytes)
    flip(source, largest.key, byte=largest.nbytes // 2)
    (tmp_path / "to").mkdir()
    result = invoke("export", source, tmp_path / "to" / name, "--format", made_as, "--json")
    assert result.exit_code == 3, result.output
    assert json.loads(result.stdout)["error"]["type"] == "CheckpointCorrupt"
    assert result.stderr.count("\n") == 2 and "checksum" in result.stderr and str(source) in result.stderr
    assert os.listdir(tmp_path / "to") == []


def test_what_cannot_be_done_is_said_in_a_line_and_leaves_nothing(path: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.write_bytes(b"mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    out = tmp_path / "out"
    cases: list[tuple[list[object], int, str]] = [
        ([path, out, "--include", "model.0.wieght"], 3, "did you mean"),
        ([path, out, "--exclude", "*"], 3, "leaves none"),
        ([path, out, "--rename", "modle.="], 3, "no selected key starts with"),
        (
            [path, out, "--include", "model.*", "--rename", "model.=", "--rename", "model.0.=2."],
            3,
            "would both be called",
        ),
        ([path, out, "--include", "v.n"], 3, "no tensor is selected"),
        ([path, out, "--include", "x.f32", "--rename", "x.f32=__metadata__"], 3, "reserves for metadata"),
        ([path, out, "--include", "x.f32", "--rename", "x.f32="], 3, "leaves an empty name"),
        ([path, out, "--dtype", "float4_e2m1fn_x2"], 3, "does not convert"),
        ([path, out, "--dtype", "int8"], 2, "no floating-point dtype"),
        ([path, out, "--max-shard-size", "5 apples"], 2, "number of bytes"),
        ([path, out, "--config", tmp_path / "none"], 3, "there is no config.json in it"),
        ([path, there, "--format", "dcp"], 3, "exists"),
        ([path, there, "--format", "torch"], 3, "exists"),
        ([path, tmp_path / "link", "--format", "dcp"], 3, "exists"),
        ([path, there / "below", "--format", "torch"], 3, "not a directory"),
        ([path, "/proc/self/out", "--format", "torch"], 3, "cannot save"),
        ([tmp_path / "nowhere", out], 3, "nothing is there"),
        ([path, out, "--format", "lightning", "--include", "x.*"], 3, "of one module"),
    ]
    for arguments, status, said in cases:
        result = invoke("export", *arguments)
        assert result.exit_code == status, (arguments, result.output)
        assert said in " ".join(result.stderr.replace("│", " ").split()), (arguments, result.stderr)
        assert status == 2 or result.stderr.count("\n") == 2, result.stderr
        assert sorted(os.listdir(tmp_path)) == ["link", "there"]
    assert (tmp_path / "there").read_bytes() == b"mine"


@pytest.mark.parametrize(("made_as", "name"), FORMATS)
def test_a_full_disk_leaves_nothing(path: Path, tmp_path: Path, made_as: str, name: str) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "small", small], capture_output=True).returncode:
        pytest.skip("needs to mount")
    try:
        result = invoke("export", path, small / name, "--format", made_as)
        assert result.exit_code == 3, result.output
        assert "No space left on device" in result.stderr and result.stderr.count("\n") == 2
        assert os.listdir(small) == []
    finally:
        subprocess.run(["umount", small], check=True)


@pytest.mark.parametrize(
    ("made_as", "name"), [("torch", "t.pt"), ("dcp", "d"), pytest.param("safetensors", "m", marks=pytest.mark.long)]
)
def test_an_interrupted_export_leaves_nothing(path: Path, tmp_path: Path, made_as: str, name: str) -> None:
    program = """
        import contextlib, signal, sys
        from dcp_plugin.tools.cli import app, transfers

        @contextlib.contextmanager
        def stopping(title):
            def stop(done, total):
                print("in the middle", flush=True)
                signal.pause()
            yield stop

        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a job in the background of a shell
        transfers.progress = stopping
        app.app(sys.argv[1:])
    """
    for number in (signal.SIGINT, signal.SIGKILL):
        process = programs.Program("-c", program, "export", path, tmp_path / name, "--format", made_as)
        assert process.stdout.readline() == "in the middle\n"
        assert os.listdir(tmp_path) == [".dcp_plugin"]
        process.send_signal(number)
        _, said = process.communicate()
        assert not (tmp_path / name).exists()
        if number == signal.SIGINT:
            assert (process.returncode, said) == (130, "interrupted\n")
            assert not os.path.lexists(tmp_path / name) and is_tidy(tmp_path)
    assert process.returncode == -signal.SIGKILL
    dcp.export(path, tmp_path / name, made_as)  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == [name]


def test_what_has_come_meanwhile_is_not_replaced(path: Path, tmp_path: Path) -> None:
    for made_as, name in FORMATS:
        out = tmp_path / name

        def put(done: int, total: int, out: Path = out) -> None:
            out.write_bytes(b"somebody else's")

        with pytest.raises(dcp.SaveFailed, match="has come while it was written"):
            dcp.export(path, out, made_as, progress=put)  # type: ignore[arg-type]
        assert out.read_bytes() == b"somebody else's"
        out.unlink()
        assert os.listdir(tmp_path) == []


# Memory


@pytest.mark.long
@pytest.mark.parametrize("made_as", ["safetensors", "torch", "dcp"])
def test_a_gibibyte_takes_half_of_one(tmp_path: Path, made_as: str) -> None:
    dcp.save({"w": {str(number): torch.randn(1 << 24) for number in range(16)}}, tmp_path / "ck")
    code = (
        "import sys, dcp_plugin\n"
        "def own():\n"
        "    lines = Path('/proc/self/status').read_text().splitlines()\n"
        "    return next(int(line.split()[1]) << 10 for line in lines if line.startswith('RssAnon'))\n"
        "from pathlib import Path\n"
        "peak, before = [0], own()\n"
        "dcp_plugin.export(*sys.argv[1:], progress=lambda done, total: peak.append(own()))\n"
        "print(max(peak) - before)\n"
    )
    done = programs.run("-c", code, tmp_path / "ck", tmp_path / "out.safetensors", made_as)
    assert int(done.stdout) < 512 << 20, done.stderr
