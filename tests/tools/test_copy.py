"""``dcp_plugin.copy`` and ``dcp-plugin copy``: every byte comes, whole or not at all, and a second try goes on."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from safetensors.torch import save_file
from torch import nn

import dcp_plugin as dcp
from dcp_plugin.core.media import medium_of
from dcp_plugin.core.media.disk.local_files import LocalFiles
from dcp_plugin.core.media.places import WORKSPACE, tree
from dcp_plugin.core.paths import Where, as_path
from dcp_plugin.core.runs import figures
from tests import programs
from tests.commands import invoke, json_of
from tests.compare import assert_same
from tests.faults.network import Cut
from tests.faults.proxy import Proxy
from tests.foreign import LIGHTNING, hugging_face
from tests.object_server import Bucket
from tests.places import names_in
from tests.places import save_file as save_torch_file

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
SIZES = (1, 2, 3, 4)
"""MiB of the tensors of a state, each in a file of its own."""


def _state(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"t{mib}": torch.randn(mib * MIB // 4, generator=generator) for mib in SIZES}
    return {**tensors, "half": torch.randn(3, 5, generator=generator).bfloat16(), "note": "text", "seed": seed}


def _save(path: Where, seed: int = 0) -> dict[str, Any]:
    state = _state(seed)
    dcp.save(state, path, step=seed, config=dcp.CheckpointConfig(io=dcp.IO(threads=4)))
    return state


def _assert_has(path: Where, state: dict[str, Any]) -> None:
    """Every byte, dtype and shape, and its own checksums."""
    report = dcp.verify(path)
    assert report.ok and not report.unverified, str(report)
    assert_same(dcp.read(path), state)


def _files(path: Where) -> dict[str, bytes]:
    medium = medium_of(path)
    files = medium.open(path)
    found = {}
    for name in tree(medium, path):
        with files.open(name) as file:
            found[name] = file.read()
    return found


def _nothing_in_flight(place: Where) -> bool:
    workspace = place / WORKSPACE
    found = medium_of(workspace).entries(workspace) if medium_of(place).kind(workspace) else []
    return all(one.path.suffix == figures.SUFFIX for one in found)


@pytest.fixture(params=["disk to disk", "disk to s3", "s3 to s3", "s3 to disk"])
def way(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Where, Where]:
    """Two places: from where, and where to."""
    kinds = request.param.split(" to ")
    made: list[Where] = []
    for kind, name in zip(kinds, ("from", "to"), strict=True):
        made.append(tmp_path / name if kind == "disk" else as_path(request.getfixturevalue("bucket").url) / name)
    return made[0], made[1]


@pytest.mark.one_of(count=2)
def test_a_copy_has_every_byte_and_is_not_made_twice(way: tuple[Where, Where]) -> None:
    source, target = way
    state = _save(source / "step-1", 1)
    told: list[tuple[int, int]] = []
    report = dcp.copy(source / "step-1", target / "step-1", progress=lambda done, total: told.append((done, total)))
    assert report.copied == [target / "step-1"] and not report.skipped
    assert told[-1][0] == told[-1][1] > sum(SIZES) * MIB
    moved = report.bytes_copied + report.bytes_linked
    assert moved == told[-1][1]
    assert bool(report.unverified) == bool(report.bytes_linked), "what the store copies does not pass through here"
    _assert_has(target / "step-1", state)
    assert dcp.inspect(target / "step-1").time == dcp.inspect(source / "step-1").time
    assert dcp.latest(target) is not None and _nothing_in_flight(target)
    again = dcp.copy(source / "step-1", target / "step-1")
    assert again.skipped == [target / "step-1"] and not again.copied and not again.bytes_copied
    if isinstance(target, Path):
        loaded = {key: torch.zeros_like(value) for key, value in state.items() if isinstance(value, torch.Tensor)}
        stock.load(loaded, checkpoint_id=str(target / "step-1"), no_dist=True)
        assert all(loaded[key].equal(state[key]) for key in loaded)


def test_what_other_readers_look_for_is_renamed_with_the_files(bucket: Bucket, tmp_path: Path) -> None:
    state = {"model": {"w": torch.randn(400_000)}, "optim": {"m": torch.randn(5)}}
    aliases = {"optim.m": ("optimizer_0.m", ("optimizer_0", "m"))}
    writer = dcp.ShardedWriter(tmp_path / "ck", views={"view_0": {"model": "module"}}, aliases=aliases)
    stock.save(state, storage_writer=writer, no_dist=True)
    there = as_path(bucket.url) / "run/ck"
    dcp.copy(tmp_path / "ck", there)
    dcp.copy(there, tmp_path / "back")
    assert dcp.verify(there).ok and dcp.verify(tmp_path / "back").ok
    for folder, keys in (("", ("model.w", "optim.m", "optimizer_0.m")), ("view_0", ("module.w",))):
        reader = stock.FileSystemReader(tmp_path / "back" / folder)
        assert set(keys) <= reader.read_metadata().state_dict_metadata.keys()
    loaded = {"module": {"w": torch.zeros(400_000)}}
    stock.load(loaded, checkpoint_id=str(tmp_path / "back/view_0"), no_dist=True)
    assert loaded["module"]["w"].equal(state["model"]["w"])
    again = as_path(bucket.url) / "run/again"
    dcp.copy(tmp_path / "back", again)
    assert _files(again) == _files(there), "the names are those of the same save"


def _snapshot(path: Path) -> None:
    hugging_face(path, *({f"w{n}": torch.randn(300_000)} for n in (1, 2)))
    (path / "config.json").write_text("{}")


def test_a_copy_leaves_out_extra_files_that_are_links_out_of_the_checkpoint(tmp_path: Path) -> None:
    _snapshot(tmp_path / "from")
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "from" / "tokenizer.json").symlink_to(tmp_path / "secret")
    (tmp_path / "from" / "same.json").symlink_to("config.json")
    report = dcp.copy(tmp_path / "from", tmp_path / "to")
    assert report.passed_over == [f"{tmp_path}/from/tokenizer.json: a link that leads elsewhere"]
    assert names_in(tmp_path / "to") == [name for name in names_in(tmp_path / "from") if name != "tokenizer.json"]


def test_a_file_that_becomes_a_link_after_the_check_is_not_copied(
    tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_text("secret")
    monkeypatch.setattr(LocalFiles, "leads_elsewhere", lambda files, name: False)  # it is a link from now on
    for number, name in enumerate(("tokenizer.json", "other.index.json")):
        source = tmp_path / str(number)
        _snapshot(source)
        (source / name).symlink_to(tmp_path / "secret")
        for target in (tmp_path / "to" / str(number), as_path(bucket.url) / str(number)):
            with pytest.raises(dcp.CheckpointCorrupt, match=f"{name}.*link out of the checkpoint"):
                dcp.copy(source, target)
            there = _files(target) if medium_of(target).kind(target) else {}
            assert b"secret" not in there.values() and dcp.latest(target) is None


def test_a_copy_of_a_snapshot_of_hugging_face_s_cache_has_all_files(tmp_path: Path) -> None:
    _snapshot(tmp_path / "blobs")
    snapshot = tmp_path / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    for name in names_in(tmp_path / "blobs"):
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    assert dcp.copy(snapshot, tmp_path / "to").passed_over == []
    assert _files(tmp_path / "to") == _files(tmp_path / "blobs")


OTHER_TOOLS: dict[str, Callable[[Path], Any]] = {
    "stock": lambda path: stock.save({"w": torch.randn(100, 10), "n": 1}, checkpoint_id=path),
    "hugging_face": _snapshot,
    "lightning": lambda path: save_torch_file({**LIGHTNING, "state_dict": {"w": torch.randn(10)}}, path),
}


@pytest.mark.one_of
@pytest.mark.parametrize("make", OTHER_TOOLS.values(), ids=OTHER_TOOLS)
def test_what_other_tools_saved_comes_as_it_is(bucket: Bucket, tmp_path: Path, make: Any) -> None:
    first, there, last = tmp_path / "from/ck", as_path(bucket.url) / "to/ck", tmp_path / "last/ck"
    make(first)
    for source, target in ((first, there), (there, last), (first, tmp_path / "beside/ck")):
        report = dcp.copy(source, target)
        assert report.copied == [target] and report.unverified, "their files have no checksums"
        assert dcp.copy(source, target).skipped == [target]
        assert dcp.inspect(target).tensors == dcp.inspect(first).tensors
    if first.is_file():
        assert last.read_bytes() == first.read_bytes() == (tmp_path / "beside/ck").read_bytes()
    else:
        assert _files(last) == _files(there) == _files(first) == _files(tmp_path / "beside/ck")
        assert (tmp_path / "beside/ck").stat().st_mtime == first.stat().st_mtime
    make(tmp_path / "other/ck")
    with pytest.raises(dcp.SaveFailed, match="another checkpoint is there"):
        dcp.copy(tmp_path / "other/ck", last)
    for target in (last, there):
        dcp.copy(tmp_path / "other/ck", target, overwrite=True)
        other = tmp_path / "other/ck"
        assert dcp.copy(other, target).skipped == [target]
    assert _nothing_in_flight(last.parent)


def _allocated(root: Path) -> int:
    found = [path.stat() for path in root.glob("[!.]*/*") if path.is_file()]
    return sum({one.st_ino: one.st_size for one in found}.values())


def test_a_run_keeps_its_links_and_its_next_copy_takes_what_is_new(tmp_path: Path, bucket: Bucket) -> None:
    run, target = tmp_path / "run", tmp_path / "copy"
    frozen, checkpointer = torch.randn(MIB // 2), dcp.Checkpointer(reuse=True)
    states = {}
    for step in (1, 2, 3, 4):
        states[step] = {"frozen": frozen, "x": torch.full((MIB // 8,), float(step))}
        checkpointer.save(states[step], run / f"step-{step}", step=step)
        if step == 3:
            (run / "last").symlink_to("step-3")
            first = dcp.copy(run, target)
            frame = first.bytes_linked % MIB  # around the payload of the item that is linked
            assert len(first.copied) == 3 and first.bytes_linked == 2 * MIB + frame
            assert os.readlink(target / "last") == "step-3" and first.links == [target / "last"]
    second = dcp.copy(run, target)
    assert second.copied == [target / "step-4"] and len(second.skipped) == 3 and not second.links
    assert second.bytes_linked == first.bytes_linked
    assert _allocated(target) == _allocated(run)
    for step, state in states.items():
        _assert_has(target / f"step-{step}", state)
    there = as_path(bucket.url) / "run"
    third = dcp.copy(run, there)
    assert third.bytes_linked == 2 * first.bytes_linked and "a bucket has none" in third.passed_over[0]
    for step, state in states.items():
        _assert_has(there / f"step-{step}", state)
    assert dcp.latest(there) == there / "step-4"


def test_a_link_is_not_made_to_a_file_at_the_target_that_is_damaged(tmp_path: Path) -> None:
    frozen, checkpointer = torch.randn(MIB // 2), dcp.Checkpointer(reuse=True)
    state = {"frozen": frozen}
    for step in (1, 2):
        checkpointer.save(state, tmp_path / f"run/step-{step}", step=step)
    dcp.copy(tmp_path / "run", tmp_path / "copy")
    checkpointer.save(state, tmp_path / "run/step-3", step=3)
    data = next((tmp_path / "copy/step-2").glob("*.distcp"))
    assert next((tmp_path / "run/step-3").glob("*.distcp")).stat().st_nlink > 1
    with open(data, "r+b") as file:
        file.seek(MIB)
        file.write(b"damage")
    report = dcp.copy(tmp_path / "run", tmp_path / "copy")
    assert report.bytes_linked == 0
    _assert_has(tmp_path / "copy/step-3", state)


def test_a_copy_that_is_not_complete_is_named(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 200))
    module[0].requires_grad_(False)
    dcp.save({"model": module}, tmp_path / "base")
    with closing(dcp.Checkpointer(trainable_only=True)) as checkpointer:
        checkpointer.load({"model": module}, tmp_path / "base")
        checkpointer.save({"model": module}, tmp_path / "run" / "step-1")
    (line,) = dcp.copy(tmp_path / "run", tmp_path / "copy").needs
    assert "leaves out model.0.weight, model.0.bias" in line and str(tmp_path / "base") in line


@pytest.mark.one_of
def test_damage_at_the_source_is_named_and_nothing_comes(way: tuple[Where, Where], tmp_path: Path) -> None:
    source, target = way
    _save(tmp_path / "made")
    data = max((tmp_path / "made").glob("*.distcp"), key=lambda path: path.stat().st_size)
    with open(data, "r+b") as file:
        file.seek(3 * MIB)
        file.write(b"damage")
    for file in sorted((tmp_path / "made").iterdir()):  # a copy by another tool, which looks at nothing
        if isinstance(source, Path):
            source.mkdir(exist_ok=True)
            shutil.copy(file, source)
        else:
            medium_of(source).note(source / file.name, file.read_bytes())
    if not isinstance(source, Path) and not isinstance(target, Path):
        assert dcp.copy(source, target / "ck").unverified, "the store copies what nobody reads"
        return
    result = invoke("copy", source, target / "ck")
    assert result.exit_code == 3 and data.name in result.stderr and "t4" in result.stderr
    assert result.stderr.count("\n") == 2
    assert not medium_of(target).kind(target / "ck") and _nothing_in_flight(target)


_DIES = """
import os, shutil, signal, sys
from dcp_plugin.tools import transfer
from dcp_plugin.tools.cli.app import app
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a job in the background of a shell
how, number, source, target = sys.argv[1:5]
copied, seen = transfer.Transfer._copied, []
def copy_one(self, *arguments):
    seen.append(arguments)
    if len(seen) == int(number):
        if how == "RMTREE":
            from dcp_plugin.core.runs import deletion
            deletion.remove(source)
        elif how == "FSIZE":
            import resource
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        else:
            os.kill(os.getpid(), getattr(signal, how))
            if how == "SIGINT":
                self._stop.wait()
    return copied(self, *arguments)
transfer.Transfer._copied = copy_one
app(["copy", source, target, "--io-threads", "1"])
"""


def _dies(how: str, number: int, source: Where, target: Where) -> Any:
    return programs.run("-c", _DIES, how, number, source, target, cwd=ROOT)


_LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("way", "how"),
    [
        ("disk to s3", "SIGKILL"),
        ("s3 to disk", "SIGINT"),
        pytest.param("disk to disk", "SIGKILL", marks=_LONG),
        pytest.param("s3 to disk", "SIGKILL", marks=_LONG),
        pytest.param("disk to s3", "SIGINT", marks=_LONG),
        pytest.param("disk to disk", "SIGINT", marks=_LONG),
    ],
    indirect=["way"],
)
def test_what_was_interrupted_is_gone_on_with(way: tuple[Where, Where], how: str) -> None:
    source, target = way
    state = _save(source / "step-1", 1)
    died = _dies(how, 3, source, target)  # 4 and 3 MiB are there then
    assert died.returncode == (130 if how == "SIGINT" else -signal.SIGKILL), died.stderr
    assert "Traceback" not in died.stderr
    assert dcp.latest(target) is None and [one.committed for one in dcp.list_checkpoints(target)] == [False]
    report = dcp.copy(source, target)
    assert report.copied == [target / "step-1"] and 7 * MIB <= report.bytes_reused < 8 * MIB
    assert 3 * MIB <= report.bytes_copied < 4 * MIB
    _assert_has(target / "step-1", state)
    assert _nothing_in_flight(target)


@pytest.mark.parametrize("changed", [False, True])
def test_an_interrupted_copy_of_another_tool_s_files_continues_with_its_complete_files(
    tmp_path: Path, changed: bool
) -> None:
    source, target = tmp_path / "from", tmp_path / "to/ck"
    _snapshot(source)
    assert _dies("SIGKILL", 3, source, target).returncode == -signal.SIGKILL
    sizes = [path.stat().st_size for path in source.glob("*.safetensors")]
    staged = sorted((tmp_path / "to").rglob("*.safetensors"))
    assert len(staged) == len(sizes) == 2
    if changed:
        with open(staged[0], "r+b") as file:
            file.write(b"damage")
    assert dcp.copy(source, target).bytes_reused == (sizes[0] if changed else sum(sizes))
    assert _files(target) == _files(source)
    assert _nothing_in_flight(tmp_path / "to")


@pytest.mark.one_of
@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_a_network_that_is_cut_is_one_error_and_what_came_before_is_kept(
    tmp_path: Path, bucket: Bucket, proxy: Proxy, method: str
) -> None:
    bare, options = as_path(bucket.url) / "run", {"retry_config": {"max_retries": 0}}
    source, target = (tmp_path / "to", bare)[:: 1 if method == "PUT" else -1]
    state = _save(source / "step-1", 1)
    files = {name: len(data) for name, data in _files(source / "step-1").items() if name.endswith(".distcp")}
    last = min(files, key=files.__getitem__).removesuffix(".distcp").partition("-")[0]
    proxy.on(lambda asked: asked.method == method and last in asked.path, Cut("before"), times=None)
    with pytest.raises(dcp.CheckpointError) as caught:
        dcp.copy(source / "step-1", target / "step-1", io_threads=1, storage_options=options)
    assert str(target / "step-1") in str(caught.value)
    proxy.forget()
    report = dcp.copy(source / "step-1", target / "step-1", storage_options=options)
    assert report.bytes_reused >= 9 * MIB
    _assert_has(target / "step-1", state)
    assert _nothing_in_flight(target)


@pytest.mark.parametrize("kind", ["disk", pytest.param("s3", marks=_LONG)])
def test_what_nobody_goes_on_with_is_swept_by_the_next_save(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    _save(tmp_path / "run/step-1", 1)
    target = tmp_path / "to" if kind == "disk" else as_path(request.getfixturevalue("bucket").url) / "to"
    died = _dies("SIGKILL", 3, tmp_path / "run/step-1", target / "step-1")
    assert died.returncode == -signal.SIGKILL
    left = tree(medium_of(target), target)
    assert sum(name.endswith(".distcp") for name in left) >= 2
    dcp.save({"n": 1}, target / "step-2")
    found = tree(medium_of(target), target)
    assert all(name.startswith("step-2/") or name.endswith(figures.SUFFIX) for name in found), left


@_LONG
def test_a_staged_file_that_has_changed_is_copied_again(tmp_path: Path) -> None:
    state = _save(tmp_path / "run/step-1", 1)
    assert _dies("SIGKILL", 3, tmp_path / "run/step-1", tmp_path / "to/step-1").returncode == -signal.SIGKILL
    staged = max((tmp_path / "to").rglob("*.distcp"), key=lambda path: path.stat().st_size)
    with open(staged, "r+b") as file:
        file.write(b"damage")
    report = dcp.copy(tmp_path / "run/step-1", tmp_path / "to/step-1")
    assert 3 * MIB <= report.bytes_reused < 4 * MIB
    _assert_has(tmp_path / "to/step-1", state)


@pytest.mark.parametrize(("how", "said"), [("FSIZE", "File too large"), ("RMTREE", "deleted or replaced")])
def test_a_source_that_is_deleted_meanwhile_and_a_full_target_leave_nothing(
    tmp_path: Path, bucket: Bucket, how: str, said: str
) -> None:
    there = as_path(bucket.url) / "from/step-1"
    _save(there, 1)
    died = _dies(how, 2, there, tmp_path / "to/step-1")
    assert died.returncode == 3, died.stderr
    assert said in died.stderr and died.stderr.count("\n") == 2 and "Traceback" not in died.stderr
    assert not (tmp_path / "to").exists() or not list((tmp_path / "to").rglob("*"))


@pytest.mark.one_of
def test_what_is_there_is_replaced_only_if_that_is_asked_for(way: tuple[Where, Where]) -> None:
    source, target = way
    new, old = _save(source / "ck", 2), _save(target / "ck", 1)
    result = invoke("copy", source / "ck", target / "ck")
    assert result.exit_code == 3 and "--overwrite" in result.stderr and result.stderr.count("\n") == 2
    _assert_has(target / "ck", old)
    document = json_of("copy", source / "ck", target / "ck", "--overwrite")
    assert document["copy"]["copied"] == [str(target / "ck")]
    _assert_has(target / "ck", new)
    assert _nothing_in_flight(target)


def test_wrong_places_are_one_line_and_status_3(tmp_path: Path) -> None:
    _save(tmp_path / "ck")
    (tmp_path / "file").write_text("text")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/notes.txt").write_text("mine")
    targets = {"gone": ["to"], "folder": ["to"], "file": ["to"], "ck": ["ck", "ck/in", "file/below", "folder", "file"]}
    for source, target in [(source, target) for source, places in targets.items() for target in places]:
        for more in ([], ["--overwrite"]):
            result = invoke("copy", tmp_path / source, tmp_path / target, *more)
            assert result.exit_code == 3 and result.stderr.strip(), (source, target)
            assert isinstance(result.exception, SystemExit), result.exception
    json_of("copy", tmp_path / "gone", tmp_path / "to", status=3)
    assert names_in(tmp_path) == ["ck", "file", "folder"]
    assert (tmp_path / "folder/notes.txt").read_text() == "mine" and (tmp_path / "file").read_text() == "text"


def test_a_save_of_another_tool_that_was_interrupted_is_passed_over_and_named(tmp_path: Path) -> None:
    for name in ("checkpoint-1", "checkpoint-2"):
        folder = tmp_path / "run" / name
        folder.mkdir(parents=True)
        save_file({"w": torch.ones(2)}, folder / "model.safetensors")
        torch.save({}, folder / "optimizer.pt")
    (tmp_path / "run" / "checkpoint-1" / "trainer_state.json").write_text("{}")
    report = dcp.copy(tmp_path / "run", tmp_path / "to")
    assert report.copied == [tmp_path / "to" / "checkpoint-1"]
    assert [text.partition(":")[0] for text in report.passed_over] == [str(tmp_path / "run" / "checkpoint-2")]


def test_torn_checkpoints_of_a_run_are_passed_over_and_named(tmp_path: Path) -> None:
    state = _save(tmp_path / "run/a/step-1", 1)
    _save(tmp_path / "run/step-2", 2)
    (tmp_path / "run/step-2/.metadata").unlink()
    report = dcp.copy(tmp_path / "run", tmp_path / "to")
    assert report.copied == [tmp_path / "to/a/step-1"]
    assert len(report.passed_over) == 1 and str(tmp_path / "run/step-2") in report.passed_over[0]
    _assert_has(tmp_path / "to/a/step-1", state)
    assert not (tmp_path / "to/step-2").exists()
