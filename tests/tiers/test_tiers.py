"""What nodes keep is found, believed only if it is whole, and read from the nearest place that has it."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dcp_plugin as dcp
from dcp_plugin.core.config import CheckpointConfig
from dcp_plugin.core.format import DATA_SUFFIX, INDEX, SUMMARY
from dcp_plugin.core.media.disk import posix
from dcp_plugin.core.storage import part_writer
from dcp_plugin.core.storage.published import read_summary
from dcp_plugin.tiers import keeper_client as keeper_client
from dcp_plugin.tiers import wire
from dcp_plugin.tiers.local_checkpoints import (
    NODE,
    LocalCheckpoint,
    LocalCheckpoints,
    Record,
    is_inside,
    make_run,
    path_of,
    saves_in,
)
from dcp_plugin.tiers.server import Server, send_range
from dcp_plugin.tiers.source import NodesSource
from dcp_plugin.tiers.source_selection import DURABLE, OWN
from tests import launch
from tests.commands import invoke
from tests.compare import assert_same as same
from tests.damage import flip_byte
from tests.launch import on_ranks

launch.preload(__name__)
pytestmark = pytest.mark.usefixtures("forked_keepers")


def state_of(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    return {"weights": torch.randn(64, 1024), "bias": torch.randn(300_000), "step": seed}


def spread(path: Path, local_dirs: list[Path], **said: Any) -> Record:
    """Put a checkpoint into the local directories of nodes, as if each rank had been on a node of its own."""
    summary = read_summary(path)
    assert summary is not None
    token = summary.save_id.replace("-", "")[:24]
    files = {str(one.relative_to(path)): one.stat().st_size for one in path.rglob("*") if one.is_file()}
    record = Record(
        str(path_of(path)), token, summary.save_id, summary.index_sha256, summary.time, summary.step, "", files, 2
    )
    record = replace(record, **{"complete": True, **said})
    for number, local_dir in enumerate(local_dirs):
        folder = LocalCheckpoints(local_dir, path_of(path).parent).make(token)
        for name in files:
            if not name.endswith(DATA_SUFFIX) or name.startswith(f"__{number}_"):
                shutil.copyfile(path / name, folder / name)
        LocalCheckpoint(folder, record).write()
    return record


def folder_of(local_dir: Path, path: Path) -> Path:
    (step,) = LocalCheckpoints(local_dir, path_of(path).parent).of_path(path_of(path))
    return step.folder


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of one rank, in ``local`` and at its path."""
    path = tmp_path / "run" / "step-1"
    dcp.save(state_of(1), path, step=1)
    spread(path, [tmp_path / "local"])
    return path


def load(path: Path, local_dir: Path, **settings: Any) -> tuple[dict[str, Any], dcp.LoadReport]:
    state = {"weights": torch.zeros(64, 1024), "bias": torch.zeros(300_000), "step": 0}
    checkpointer = dcp.Checkpointer(keeper={"dir": str(local_dir)}, **settings)
    report = checkpointer.load(state, path)
    checkpointer.close()
    return state, report


def test_a_file_that_the_node_lacks_is_read_by_the_name_that_it_has_at_the_path(saved: Path, tmp_path: Path) -> None:
    for number, file in enumerate(sorted(saved.glob("*.distcp"))):  # the path has the token of its own reservation
        (folder_of(tmp_path / "local", saved) / file.name).unlink()
        file.rename(saved / f"__0_{number}-0123456789abcdef.distcp")
    state, report = load(saved, tmp_path / "local")
    same(state, state_of(1))
    assert report.sources["durable"] > 64 * 1024 * 4


@pytest.mark.one_of
@pytest.mark.parametrize("table", [SUMMARY, INDEX])
@pytest.mark.parametrize("damage", ["missing", "flipped"])
def test_a_save_whose_tables_the_node_has_lost_is_read_at_its_path(
    tmp_path: Path, table: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The tables at the path name other files, in another length: one of each place would make no checkpoint."""
    saver = dcp.Checkpointer(keeper={"dir": str(tmp_path / "local"), "durable_every": 1})
    path = tmp_path / "run" / "step-1"
    saver.save({"state": state_of(0)}, tmp_path / "run" / "step-0")
    saver.save({"state": state_of(1)}, path)
    saver.close()
    file = folder_of(tmp_path / "local", path) / table
    assert (path / INDEX).stat().st_size != file.with_name(INDEX).stat().st_size
    if damage == "missing":
        file.unlink()
    else:
        flip_byte(file)
    resumed = state_of(0)
    start = dcp.resume_or_init({"state": resumed}, path.parent, keeper={"dir": str(tmp_path / "local")})
    assert (start.how, start.path) == ("resumed", path)
    same(resumed, state_of(1))
    assert not (path / "dcp_plugin.damaged").exists()
    warnings = [text for record in caplog.records if (text := record.getMessage()).startswith(str(path))]
    assert any(text.startswith(f"{path} is read at its path alone: {path}/{table} ") for text in warnings)
    assert [
        text.endswith(f"{table} cannot be read from this node: its bytes are not those that were saved")
        for text in warnings[:-1]
    ] == [True] * (damage == "flipped")


def test_a_save_that_only_the_node_has_is_found_by_the_path_that_it_would_have(saved: Path, tmp_path: Path) -> None:
    shutil.rmtree(saved)
    assert dcp.latest(saved.parent) is None
    assert dcp.latest(saved.parent, local_dir=tmp_path / "local") == saved
    assert dcp.latest(saved.parent.parent, local_dir=tmp_path / "local") == saved
    (listed,) = dcp.list_checkpoints(saved.parent, local_dir=tmp_path / "local")
    assert (listed.path, listed.step, listed.tier, listed.committed) == (saved, 1, "local", True)
    state, report = load(saved, tmp_path / "local")
    same(state, state_of(1))
    assert set(report.sources) == {OWN} and sum(report.sources.values()) > 64 * 1024 * 4
    resumed = state_of(0)
    start = dcp.resume_or_init(resumed, saved.parent, keeper={"dir": str(tmp_path / "local")})
    assert (start.how, start.path, start.step) == ("resumed", saved, 1)
    same(resumed, state_of(1))


def test_the_command_line_lists_it_too(saved: Path, tmp_path: Path) -> None:
    shutil.rmtree(saved.parent)
    shown = invoke("list", saved.parent, "--local-dir", tmp_path / "local")
    assert shown.exit_code == 0 and "only in keeper.dir" in shown.output


def test_what_is_there_is_read_and_the_rest_comes_from_the_path(saved: Path, tmp_path: Path) -> None:
    one = next(folder_of(tmp_path / "local", saved).glob(f"*{DATA_SUFFIX}"))
    one.unlink()
    state, report = load(saved, tmp_path / "local")
    same(state, state_of(1))
    assert set(report.sources) == {OWN, DURABLE}


@pytest.mark.parametrize("damage", ["a byte", "cut", "gone while it is read", "index", "summary"])
def test_damage_is_passed_over_and_told(
    saved: Path, tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(tmp_path / "local", saved)
    data = max(folder.glob(f"*{DATA_SUFFIX}"), key=lambda one: one.stat().st_size)
    if damage == "a byte":
        flip_byte(data, -1000)
    elif damage == "cut":
        os.truncate(data, 100)
    elif damage == "index":
        flip_byte(folder / INDEX, 500)
    elif damage == "summary":
        flip_byte(folder / SUMMARY, 100)
    else:
        looked = LocalCheckpoint.present_files

        def there(step: LocalCheckpoint) -> set[str]:
            found = looked(step)
            data.unlink(missing_ok=True)
            return found

        monkeypatch.setattr(LocalCheckpoint, "present_files", there)
    state, report = load(saved, tmp_path / "local")
    same(state, state_of(1))
    assert DURABLE in report.sources
    assert damage == "cut" or report.passed_over  # a file of another size is no file of this save


def test_if_no_place_has_the_bytes_an_older_save_is_resumed_and_nothing_damaged_is_taken_again(
    saved: Path, tmp_path: Path
) -> None:
    newer = saved.with_name("step-2")
    dcp.save(state_of(2), newer, step=2)
    spread(newer, [tmp_path / "local"])
    shutil.rmtree(newer)
    data = max(folder_of(tmp_path / "local", newer).glob(f"*{DATA_SUFFIX}"), key=lambda one: one.stat().st_size)
    flip_byte(data, -1000)
    state = state_of(0)
    start = dcp.resume_or_init(state, saved.parent, keeper={"dir": str(tmp_path / "local")})
    assert (start.path, start.damaged) == (saved, (newer,))
    same(state, state_of(1))
    assert dcp.latest(saved.parent, local_dir=tmp_path / "local") == saved


def test_to_remove_a_link_takes_nothing_from_what_it_leads_to(saved: Path, tmp_path: Path) -> None:
    local = tmp_path / "local"
    last = saved.parent / "last"
    last.symlink_to(saved.name)
    steps = LocalCheckpoints(local, path_of(saved).parent)
    checkpointer = dcp.Checkpointer(keeper={"dir": str(local)})
    checkpointer.remove(last)
    assert len(steps.all()) == 1 and saved.is_dir() and not last.is_symlink()
    checkpointer.remove(saved)
    checkpointer.close()
    assert not steps.all() and not saved.exists()


def test_to_remove_a_checkpoint_by_another_name_of_its_folder_takes_its_local_parts_too(
    saved: Path, tmp_path: Path
) -> None:
    other_name = tmp_path / "other name"
    other_name.symlink_to(saved.parent)
    checkpointer = dcp.Checkpointer(keeper={"dir": str(tmp_path / "local")})
    checkpointer.remove(other_name / saved.name)
    checkpointer.close()
    assert dcp.latest(saved.parent, local_dir=tmp_path / "local") is None


def test_a_newer_save_at_the_same_path_counts_more_than_what_is_local(saved: Path, tmp_path: Path) -> None:
    dcp.save(state_of(7), saved, step=7)
    state, report = load(saved, tmp_path / "local")
    same(state, state_of(7))
    assert report.sources == {}


def _of_another_run(folder: Path) -> None:
    step = LocalCheckpoint(folder, Record.decode((folder / NODE).read_bytes()))
    LocalCheckpoint(folder, replace(step.record, run="f" * 32)).write()


def _of_an_older_format(folder: Path) -> None:
    said = json.loads((folder / NODE).read_bytes())
    (folder / NODE).write_text(json.dumps({**said, "format": 0}))


STALE: dict[str, Callable[[Path], Any]] = {
    "of another run": _of_another_run,
    "another version": _of_an_older_format,
    "record is damaged": lambda folder: (folder / NODE).write_bytes(
        (folder / NODE).read_bytes().replace(b'"step": 1', b'"step": 9')
    ),
    "another user": lambda folder: os.chown(folder, 12345, 12345),
}


@pytest.mark.parametrize("told", STALE)
def test_stale_saves_are_never_taken_and_it_is_told_why(
    saved: Path, tmp_path: Path, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    if told == "another user" and os.geteuid() != 0:
        pytest.skip("chown needs root")
    shutil.rmtree(saved)
    make_run(saved.parent)
    STALE[told](folder_of(tmp_path / "local", saved))
    state = state_of(0)
    start = dcp.resume_or_init(state, saved.parent, keeper={"dir": str(tmp_path / "local")})
    assert start.how == "fresh" and told in caplog.text
    same(state, state_of(0))
    assert dcp.latest(saved.parent, local_dir=tmp_path / "local") is None


@pytest.mark.parametrize(
    ("files", "inside"),
    [
        ("../x", False),
        ("/etc/passwd", False),
        ("a/../../b", False),
        ("", False),
        ("a\0b", False),
        ("view/.metadata", True),
    ],
)
def test_a_record_names_only_what_is_below_it(files: str, inside: bool) -> None:
    assert is_inside(files) is inside
    record = Record("/run/step-1", "t", "s", "i", 1.0, 1, "", {files: 1}, 1)
    if inside:
        assert Record.decode(record.encode()) == record
    else:
        with pytest.raises(ValueError, match="not below it"):
            Record.decode(record.encode())


def test_no_byte_of_a_record_changes_unnoticed() -> None:
    data = Record("/run/step-1", "t", "s", "i", 1.0, 1, "", {"a": 1}, 1).encode()
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1
        with pytest.raises(ValueError, match=r"damaged|another version"):
            Record.decode(bytes(changed))


def test_the_newest_complete_saves_are_kept_and_debris_is_swept(tmp_path: Path) -> None:
    steps = LocalCheckpoints(tmp_path, Path("/run"))
    for number in range(5):
        folder = steps.make(f"t{number}")
        record = Record(f"/run/{number}", f"t{number}", "s", "i", float(number), number, "", {}, 1, complete=number < 4)
        LocalCheckpoint(folder, record).write()
    steps.make("t5")
    assert steps.keep(2, needed={"t1"}) == ["t0"]
    steps.collect_garbage(list)
    assert [step.record.token for step in steps.all()] == ["t1", "t2", "t3", "t4"]  # t4: not complete, but newer
    assert not steps.folder_of("t5").exists()


def test_two_ranks_that_open_a_directory_at_once_both_see_their_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints, opened, made = LocalCheckpoints(tmp_path, Path("/run")), posix.OwnFolder, list[Any]()

    def open_late(folder: Path) -> posix.OwnFolder:
        if not made:  # the thread of the other rank is faster
            made.append(None)
            made.append(checkpoints.make("other"))
        return opened(folder)

    monkeypatch.setattr(posix, "OwnFolder", open_late)
    folder = checkpoints.make("this")
    assert folder.is_dir() and made[1].is_dir()


def test_a_link_in_place_of_the_directory_leads_no_deletion_out_of_it(tmp_path: Path) -> None:
    home, root = tmp_path / "home", tmp_path / "run"
    (home / "thesis").mkdir(parents=True)
    (home / "thesis" / "chapter-1").write_text("words")
    checkpointer = dcp.Checkpointer(keeper={"dir": str(tmp_path / "local"), "linger": 0.0})
    checkpointer.save(state_of(1), root / "step-1", step=1)
    steps = LocalCheckpoints(tmp_path / "local", path_of(root / "step-1").parent)
    steps.folder.rename(tmp_path / "moved")
    steps.folder.symlink_to(home)
    checkpointer.save(state_of(2), root / "step-2", step=2)
    steps.collect_garbage(list)
    with pytest.raises(NotADirectoryError, match="it is a link"):
        steps.remove("thesis")
    checkpointer.close()
    assert (home / "thesis" / "chapter-1").read_text() == "words"
    assert [path.name for path in home.iterdir()] == ["thesis"]
    assert dcp.latest(root) == root / "step-2"
    saves, (problem,) = saves_in(steps.folder)
    assert saves == steps.all() == [] and "it is a link" in problem


def test_a_record_that_cannot_be_read_is_not_deleted_with_the_garbage(saved: Path, tmp_path: Path) -> None:
    _of_an_older_format(folder_of(tmp_path / "local", saved))
    steps = LocalCheckpoints(tmp_path / "local", path_of(saved).parent)
    steps.make("never-completed")
    steps.collect_garbage(list)
    assert len(list(steps.folder.iterdir())) == 1


@pytest.mark.one_of("names")
@pytest.mark.parametrize("names", ["a path for each", "one path"])
def test_local_saves_after_a_clock_was_set_back_are_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: str
) -> None:
    now, local, root = [0.0], tmp_path / "local", tmp_path / "run"
    clock = SimpleNamespace(**vars(keeper_client.time) | {"time": lambda: 1.7e9 + now[0]})
    for module in (part_writer, keeper_client):
        monkeypatch.setattr(module, "time", clock)
    durable = 1 if names == "one path" else None
    times = []
    for step, (minutes, begins_anew) in enumerate([(900, True), (500, False), (600, True), (320, True)], start=1):
        now[0] = 60.0 * minutes
        if begins_anew:
            checkpointer = dcp.Checkpointer(
                async_save=True, keeper={"dir": str(local), "durable_every": durable, "linger": 60.0}
            )
        path = root / ("last" if durable else f"step-{step}")
        checkpointer.save({"n": step}, path, step=step).wait()
        (newest,) = dcp.list_checkpoints(root, local_dir=local)[-1:]
        assert (newest.path, newest.step) == (path, step)
        times.append(newest.time)
        if step != 1:
            checkpointer.close()
    assert times == sorted(set(times))


# Two nodes


@on_ranks(2)
def test_a_rank_reads_the_other_nodes_bytes_over_the_network_and_only_those_it_wants(tmp_path: Path) -> None:
    rank, path = dist.get_rank(), tmp_path / "run" / "step-1"
    mesh = init_device_mesh("cpu", (2,))
    full = state_of(1)["weights"]
    dcp.save({"weights": distribute_tensor(full, mesh, [Shard(0)])}, path, step=1)
    if rank == 0:
        spread(path, [tmp_path / "local0", tmp_path / "local1"])
        shutil.rmtree(path)
    dist.barrier()
    checkpointer = dcp.Checkpointer(keeper={"dir": str(tmp_path / f"local{rank}")})
    columns = {"weights": distribute_tensor(torch.zeros_like(full), mesh, [Shard(1)])}
    report = checkpointer.load(columns, path)
    same({"weights": columns["weights"].full_tensor()}, {"weights": full})
    (other,) = set(report.sources) - {OWN}
    assert other == f"node {socket.gethostname()}" and report.sources[other] <= full.nbytes
    # A rank that wants what its own node has asks nobody.
    rows = {"weights": distribute_tensor(torch.zeros_like(full), mesh, [Shard(0)])}
    report = checkpointer.load(rows, path)
    same({"weights": rows["weights"].full_tensor()}, {"weights": full})
    assert set(report.sources) == {OWN}
    checkpointer.close()


@on_ranks(2)
def test_what_lacks_a_nodes_part_is_passed_over_on_all_ranks(tmp_path: Path) -> None:
    rank, root, mesh = dist.get_rank(), tmp_path / "run", init_device_mesh("cpu", (2,))
    for step in (1, 2):
        weights = distribute_tensor(torch.full((400, 1000), float(step)), mesh, [Shard(0)])
        dcp.save({"weights": weights}, root / f"{step}", step=step)
    if rank == 0:
        spread(root / "2", [tmp_path / "local0", tmp_path / "local1"])
        shutil.rmtree(root / "2")
        shutil.rmtree(tmp_path / "local1")  # with its node
    dist.barrier()
    state = {"weights": torch.zeros(400, 1000)}
    checkpointer = dcp.Checkpointer(keeper={"dir": str(tmp_path / f"local{rank}")})
    start = dcp.resume_or_init(state, root, checkpointer=checkpointer)
    assert start.step == 1
    same(state, {"weights": torch.ones(400, 1000)})
    with pytest.raises(dcp.CheckpointNotFound, match="no node that is left has"):
        checkpointer.load(state, root / "2")
    checkpointer.close()


# Messages


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Server, bytes]]:
    key = wire.new_key()
    (tmp_path / "file").write_bytes(bytes(range(256)) * 4096)

    def read(channel: wire.Channel, name: str, offset: int, count: int) -> None:
        send_range(channel, tmp_path / name if name == "file" else None, offset, count)

    server = Server(("127.0.0.1", 0), [key], {}, {"read": read})
    yield server, key
    server.close()


def test_ranges_of_files_come_as_they_are_and_end_where_the_file_does(served: tuple[Server, bytes]) -> None:
    server, key = served
    whole = bytes(range(256)) * 4096
    with closing(wire.connect(server.address, key, 10)) as channel:
        for offset, count in ((0, len(whole)), (5, 1000), (len(whole) - 10, 100), (len(whole), 5)):
            channel.send(("read", ("file", offset, count)))
            answer, told = channel.receive()
            memory = memoryview(bytearray(told))
            channel.receive_into([memory[: told // 2], memory[told // 2 :]])
            assert (answer, bytes(memory)) == ("ok", whole[offset : offset + count])
        channel.send(("read", ("other", 0, 5)))
        answer, error = channel.receive()
        assert answer == "error" and isinstance(error, FileNotFoundError)


def test_who_does_not_know_the_key_is_told_nothing(served: tuple[Server, bytes]) -> None:
    server, _ = served
    with pytest.raises(PermissionError):
        wire.connect(server.address, wire.new_key(), 10)
    with socket.create_connection(server.address, 10) as raw:  # type: ignore[arg-type]
        challenge = raw.recv(64)
        raw.sendall(b"x" * 72)
        assert len(challenge) == 32 and raw.recv(64) == b""


def test_silent_connections_of_others_take_no_descriptors_from_the_job(served: tuple[Server, bytes]) -> None:
    server, key = served
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    silent: list[socket.socket] = []
    try:
        silent += [socket.create_connection(server.address, 10) for _ in range(1100)]  # type: ignore[arg-type]
        with closing(wire.connect(server.address, key, 10)) as channel:
            channel.send(("read", ("file", 0, 5)))
            assert channel.receive() == ("ok", 5)
        for one in silent[:1000]:
            while one.recv(100):  # until the server has ended it
                pass
    finally:
        for one in silent:
            one.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_server_that_does_not_know_the_key_is_not_believed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.sendall(b"n" * 32)
                connection.recv(72)
                connection.sendall(b"p" * 32)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(PermissionError):
            wire.connect(listening.getsockname(), wire.new_key(), 10)
        thread.join()


def test_on_one_host_the_kernel_says_whose_the_other_end_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(str(tmp_path / "sock"), (), {"greet": lambda name: {"hello": name}}, {})
    with closing(wire.connect(str(tmp_path / "sock"), b"", 10)) as channel:
        channel.send(("greet", (1,)))
        assert channel.receive() == ("ok", {"hello": 1})
    assert (tmp_path / "sock").stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(PermissionError):
        wire.connect(str(tmp_path / "sock"), b"", 10)
    server.close()
    assert not (tmp_path / "sock").exists()


def test_a_message_that_is_too_long_to_be_one_ends_the_connection(served: tuple[Server, bytes]) -> None:
    server, key = served
    with closing(wire.connect(server.address, key, 10)) as channel:
        channel._socket.sendall(struct.pack("!Q", 1 << 60))
        with pytest.raises(ConnectionResetError):
            channel.receive()


# Settings


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"keeper": {"keep": 0}}, "keeper.keep must be at least 1"),
        ({"keeper": {"replicas": 1}}, "set keeper.dir"),
        ({"keeper": {"durable_every": 0, "dir": "x"}}, "keeper.durable_every must be at least 1"),
        ({"keeper": {"bandwidth": 0}}, "keeper.bandwidth must be positive"),
        ({"keeper": {"dir": "s3://bucket/x"}}, "keeper.dir must be on a file system"),
    ],
)
def test_settings_that_make_no_sense_are_refused_in_words(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        CheckpointConfig(**settings)


def test_parts_of_all_nodes_in_one_folder_are_a_checkpoint_that_stock_loads(tmp_path: Path) -> None:
    path = tmp_path / "run" / "step-1"
    launch.run(_save_sharded, 2, path)
    spread(path, [tmp_path / "local0", tmp_path / "local1"])
    together = tmp_path / "together"
    for local_dir in ("local0", "local1"):
        shutil.copytree(folder_of(tmp_path / local_dir, path), together, dirs_exist_ok=True)
    state = {"weights": torch.zeros(1000, 100)}
    stock.load(state, checkpoint_id=str(together))
    same(state, {"weights": torch.arange(100_000.0).view(1000, 100)})
    assert dcp.verify(together).ok


def _save_sharded(path: Path) -> None:
    full = torch.arange(100_000.0).view(1000, 100)
    dcp.save({"weights": distribute_tensor(full, init_device_mesh("cpu", (2,)), [Shard(0)])}, path)


def test_a_local_dir_that_does_not_exist_has_no_saves(tmp_path: Path) -> None:
    config = CheckpointConfig(keeper=dcp.Keeper(dir=str(tmp_path / "no" / "such")))
    assert NodesSource(config).states(tmp_path / "run") == []
