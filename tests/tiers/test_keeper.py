"""The keeper: what was handed over is written, with the bytes that it had then, whoever dies; and nothing is left."""

from __future__ import annotations

import errno
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from torch.testing._internal.two_tensor import TwoTensor

import dcp_plugin as dcp
from dcp_plugin import events
from dcp_plugin.core.errors import NoSharedMemory
from dcp_plugin.core.format.summary import Summary
from dcp_plugin.core.media import medium_of
from dcp_plugin.core.paths import Where, as_path, options_of, resolved
from dcp_plugin.core.saving.queue import RunningSave
from dcp_plugin.core.storage import part_writer
from dcp_plugin.core.storage.part_writer import Publication
from dcp_plugin.errors import SaveFailed
from dcp_plugin.tiers import keeper_client as keeper_client
from dcp_plugin.tiers import locks, plain, spool
from dcp_plugin.tiers.coordinator import Coordinator, Save
from dcp_plugin.tiers.journal import Journal
from dcp_plugin.tiers.journal_records import End, Peer
from dcp_plugin.tiers.keeper_client import start_keeper
from dcp_plugin.tiers.keeper_writer import KeptSaves
from dcp_plugin.tiers.local_checkpoints import new_token, time_of
from dcp_plugin.tiers.node import Node
from dcp_plugin.tiers.spool import SLAB, Spool
from dcp_plugin.tiers.wire import Channel
from tests import launch, programs
from tests.compare import same_bytes
from tests.faults.network import Silence
from tests.faults.proxy import Proxy, where
from tests.launch import on_ranks
from tests.limits import HANG
from tests.object_server import Bucket
from tests.slowness import Gate, slow_copies

launch.preload(__name__)
pytestmark = pytest.mark.usefixtures("forked_keepers")

_TRAINING = """
import os, signal, sys, torch, dcp_plugin as dcp
if __name__ == "__main__":
    root, local, dies_at = sys.argv[1:]
    checkpointer = dcp.Checkpointer(async_save=True, keeper={"dir": local or None, "linger": 0.5})
    checkpointer.save({"weights": torch.arange(1000.0)}, f"{root}/step-1", step=1).wait()
    print("saved", flush=True)
    if os.fork() == 0:  # as a worker of a data loader, which does not hear of the death of the training
        os.setsid()
        print("worker", os.getpid(), flush=True)
        os.close(1)
        os.close(2)
        signal.pause()
        os._exit(0)
    if dies_at:
        from dcp_plugin.tiers.spool import Spool
        put = Spool.put
        def dying(self, name, data):
            if name.endswith(dies_at):
                os.kill(os.getpid(), signal.SIGKILL)
            put(self, name, data)
        Spool.put = dying
    checkpointer.save({"weights": torch.arange(1000.0) + 1}, f"{root}/step-2", step=2)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def _weights(path: Path) -> torch.Tensor:
    state = {"weights": torch.zeros(1000)}
    stock.load(state, checkpoint_id=str(path))
    return state["weights"]


def _wait(reached: object, what: str) -> None:
    deadline = time.monotonic() + HANG
    while not reached():  # type: ignore[operator]
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def _killed_training(tmp_path: Path, local: str, dies_at: str = "") -> Spool:
    """The spool of a training that was killed, while a process that it had forked lives on."""
    script = tmp_path / "train.py"
    script.write_text(_TRAINING)
    root = tmp_path / "run"
    with (tmp_path / "said").open("w+") as said:
        ended = subprocess.run(
            [sys.executable, str(script), str(root), local, dies_at], stdout=said, stderr=said, timeout=HANG
        )
        said.seek(0)
        lines = said.read()
    assert ended.returncode == -signal.SIGKILL, lines
    worker = int(lines.partition("worker ")[2].split()[0])
    try:
        spool = Spool.of(root.resolve(), local or None)
        _wait(lambda: not spool.is_kept(), f"the keeper lives on: {lines}")
    finally:
        os.kill(worker, signal.SIGKILL)
    return spool


def test_what_a_save_has_returned_for_is_published_after_a_kill_and_the_keeper_ends(tmp_path: Path) -> None:
    spool = _killed_training(tmp_path, "")
    assert torch.equal(_weights(tmp_path / "run/step-2"), torch.arange(1000.0) + 1)
    _wait(lambda: not (spool.folder / "root").exists(), f"{spool.folder} was not removed")
    shutil.rmtree(spool.folder, ignore_errors=True)


def test_a_training_that_dies_while_it_hands_over_leaves_nothing_in_memory(tmp_path: Path) -> None:
    spool = _killed_training(tmp_path, "", dies_at=".go")
    assert not (tmp_path / "run/step-2").exists()
    assert torch.equal(_weights(tmp_path / "run/step-1"), torch.arange(1000.0))
    _wait(lambda: not (spool.folder / "root").exists(), f"{spool.folder} was not removed")
    shutil.rmtree(spool.folder, ignore_errors=True)


def test_a_stopped_holder_of_the_lock_is_named_and_the_save_goes_on_without_a_keeper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program = textwrap.dedent("""
        import fcntl, os, signal, sys
        descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.lockf(descriptor, fcntl.LOCK_EX)
        print("locked", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    """)
    memory = Path(tempfile.mkdtemp(dir=spool._MEMORY))
    monkeypatch.setattr(spool, "_MEMORY", memory)
    monkeypatch.setattr(locks, "_LOCK_SECONDS", 0.1)
    lock = spool.base_directory() / ".door" / "lock"
    lock.parent.mkdir()
    holder = subprocess.Popen([programs.PYTHON, "-c", program, str(lock)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == b"locked\n"
        os.waitid(os.P_PID, holder.pid, os.WSTOPPED | os.WNOWAIT)
        checkpointer = dcp.Checkpointer(async_save=True, keeper=dcp.Keeper())
        checkpointer.save({"weights": torch.arange(1000.0)}, tmp_path / "run/step-1").wait()
        checkpointer.close()
    finally:
        holder.kill()
        holder.communicate()
        shutil.rmtree(memory)
    assert f"is held by process {holder.pid}, whose state is T (stopped)" in caplog.text
    assert torch.equal(_weights(tmp_path / "run/step-1"), torch.arange(1000.0))


def _keeper_of(root: Path, local: Path | None) -> int:
    pid = Spool.of(root.resolve(), None if local is None else str(local)).pid()
    assert pid is not None
    return pid


@contextmanager
def _stopped(pid: int) -> Iterator[None]:
    """A process that is stopped, and goes on afterwards until it has ended."""
    watch = os.pidfd_open(pid)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        raise
    os.kill(pid, signal.SIGCONT)
    select.select([watch], [], [], HANG)
    os.close(watch)


@pytest.mark.one_of
@pytest.mark.parametrize("tier", ["none", "local"])
def test_a_stopped_keeper_is_named_and_the_ranks_write_its_saves(
    tmp_path: Path, tier: str, caplog: pytest.LogCaptureFixture
) -> None:
    local = tmp_path / "local" if tier == "local" else None
    keeper = {"dir": local}
    checkpointer = dcp.Checkpointer(async_save=True, keeper={**keeper, "linger": 0.0}, timeout=5.0)
    state = {"weights": torch.arange(1000.0)}
    checkpointer.save(state, tmp_path / "run/last", step=1).wait()
    pid = _keeper_of(tmp_path / "run", local)
    with _stopped(pid):
        state["weights"] += 1
        handle = checkpointer.save(state, tmp_path / "run/last", step=2)
        state["weights"] += 1
        handle.wait()
        assert handle.finished is not None and handle.finished.tier == "durable"
        assert f"does not answer: it is process {pid}, whose state is T (stopped)" in handle.finished.degraded
        assert torch.equal(_weights(tmp_path / "run/last"), torch.arange(1000.0) + 1)
        checkpointer.save(state, tmp_path / "run/last", step=3).wait()
        checkpointer.close()
        assert "run/last is saved without a keeper" in caplog.text
        another = {"weights": torch.zeros(1000)}
        assert dcp.resume_or_init(another, tmp_path / "run", timeout=5.0, keeper=keeper).step == 3
        assert same_bytes(another["weights"], torch.arange(1000.0) + 2)
    assert dcp.inspect(tmp_path / "run/last").step == 3  # what the keeper still had did not replace it
    assert dcp.latest(tmp_path / "run", local_dir=local) == tmp_path / "run/last"


def test_memory_of_a_save_that_was_taken_from_a_stopped_keeper_is_not_used_again(tmp_path: Path) -> None:
    """The keeper goes on, and may still read it."""
    root = tmp_path / "run"
    checkpointer = dcp.Checkpointer(async_save=True, keeper={"linger": 0.0}, timeout=5.0)
    checkpointer.save({"weights": torch.arange(1000.0)}, root / "step-1", step=1).wait()
    keeper, memory = _keeper_of(root, None), Spool.of(root.resolve(), None)
    os.kill(keeper, signal.SIGSTOP)
    handle = checkpointer.save({"weights": torch.arange(1000.0)}, root / "step-2", step=2)
    used = {name for name in memory.names("") if name.startswith(SLAB)}
    handle.wait()
    os.kill(keeper, signal.SIGCONT)
    client = checkpointer._writer.saves.client  # type: ignore[attr-defined]
    _wait(lambda: client._failure is None, "saves still go on without the keeper")
    checkpointer.save({"weights": torch.arange(1000.0)}, root / "step-3", step=3).wait()
    in_use = {name for name in memory.names("") if name.startswith(SLAB)}
    assert used and in_use and not used & in_use
    checkpointer.close()


def test_a_save_without_a_keeper_is_the_newest_after_the_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    root, local, now = tmp_path / "run", tmp_path / "local", [time.time()]
    clock = SimpleNamespace(**vars(time) | {"time": lambda: now[0]})
    for module in (part_writer, keeper_client):
        monkeypatch.setattr(module, "time", clock)
    keeper = dcp.Keeper(dir=str(local), keep=9, durable_every=100, linger=0.0)
    checkpointer = dcp.Checkpointer(async_save=True, keeper=keeper, timeout=5.0)

    def save(step: int) -> None:
        checkpointer.save({"n": step}, root / f"step-{step}", step=step).wait()
        assert dcp.latest(root, local_dir=local) == root / f"step-{step}"

    save(1)
    now[0] -= 3 * 3600
    with _stopped(_keeper_of(root, local)):
        save(2)  # revoked, and written by the ranks
        save(3)  # never handed over
        checkpointer.close()
    checkpointer = dcp.Checkpointer(async_save=True, keeper=keeper, timeout=5.0)
    save(4)
    checkpointer.close()
    times = [checkpoint.time for checkpoint in dcp.list_checkpoints(root, local_dir=local)]
    assert sorted(times) == times and len(set(times)) == 4
    assert caplog.text.count("s behind the newest save. Recorded times go on from there.") == 2  # once for each


@pytest.mark.parametrize("tier", ["none", "local"])
def test_close_returns_and_says_what_is_not_durable_while_the_path_hangs(
    bucket: Bucket, proxy: Proxy, tmp_path: Path, tier: str
) -> None:
    proxy.on(where(), Silence(), times=None)
    local = None if tier == "none" else str(tmp_path / "local")
    checkpointer = dcp.Checkpointer(async_save=True, keeper={"dir": local, "linger": 0.0}, timeout=5.0)
    root = as_path(f"{bucket.url}/run")
    handle = checkpointer.save({"weights": torch.arange(1000.0)}, root / "step-1", step=1)
    if tier == "local":
        handle.wait_local()
    with pytest.raises(TimeoutError):
        handle.wait(0.1)
    with pytest.raises(SaveFailed, match=r"step-1 is .*not durable"):
        checkpointer.close()
    if (keeper := Spool.of(resolved(root), local).pid()) is not None:
        os.kill(keeper, signal.SIGKILL)


def _close_while_the_path_hangs(root: Where, folder: Path, tier: str) -> str:
    """Save and close, with a directory for each rank, or without. Return the message of ``close``."""
    local = str(folder / f"local-{dist.get_rank()}") if tier == "local" else None
    checkpointer = dcp.Checkpointer(async_save=True, keeper={"dir": local, "linger": 0.0}, timeout=5.0)
    handle = checkpointer.save({"weights": torch.arange(1000.0)}, root / "step-1", step=1)
    if tier == "local":
        handle.wait_local()
    with pytest.raises(dcp.CheckpointError) as caught:
        checkpointer.close()
    dist.barrier()
    if (keeper := Spool.of(resolved(root), local).pid()) is not None:
        with suppress(ProcessLookupError):  # without a directory both ranks have the same
            os.kill(keeper, signal.SIGKILL)
    return str(caught.value)


@pytest.mark.one_of
@pytest.mark.parametrize("tier", ["none", "local"])
def test_close_returns_on_both_ranks_while_the_path_hangs(
    bucket: Bucket, proxy: Proxy, tmp_path: Path, tier: str
) -> None:
    proxy.on(where(), Silence(), times=None)
    texts = launch.run(_close_while_the_path_hangs, 2, as_path(f"{bucket.url}/run"), tmp_path, tier)
    assert all("step-1" in text for text in texts)
    assert any("not durable" in text for text in texts), "a rank may also see that the other has stopped waiting first"


@on_ranks(2)
def test_a_stopped_keeper_of_another_node_stops_no_rank(tmp_path: Path) -> None:
    rank, root = dist.get_rank(), tmp_path / "run"
    local = tmp_path / f"local-{rank}"
    checkpointer = dcp.Checkpointer(async_save=True, keeper={"dir": str(local), "linger": 0.0}, timeout=5.0)
    state = {"weights": torch.arange(1000.0)}
    checkpointer.save(state, root / "step-1", step=1).wait()
    pid = _keeper_of(root, local)
    dist.barrier()
    with _stopped(pid) if rank == 1 else nullcontext():
        dist.barrier()
        handle = checkpointer.save({"weights": torch.arange(1000.0) + 1}, root / "step-2", step=2)
        handle.wait()
        assert handle.finished is not None and "does not answer" in handle.finished.degraded
        checkpointer.close()
        dist.barrier()
    assert torch.equal(_weights(root / "step-2"), torch.arange(1000.0) + 1)


@on_ranks(2)
def test_a_training_starts_while_keepers_of_one_node_are_stopped_with_saves(tmp_path: Path) -> None:
    """The other rank waits for the first one until the timeout, whatever it has to wait for."""
    rank, roots = dist.get_rank(), (tmp_path / "run/a", tmp_path / "run/b")
    local = tmp_path / f"local-{rank}"
    tiers: dict[str, Any] = {"keeper": {"dir": str(local), "linger": 0.0}, "timeout": 10.0}
    checkpointers = [dcp.Checkpointer(async_save=True, **tiers) for _ in roots]
    for checkpointer, root in zip(checkpointers, roots, strict=True):
        checkpointer.save({"n": 1}, root / "step-1", step=1).wait()
    dist.barrier()
    with ExitStack() as stopped:
        for root in roots if rank == 1 else ():
            stopped.enter_context(_stopped(_keeper_of(root, local)))
        dist.barrier()
        handles = [
            checkpointer.save({"n": 2}, root / "step-2", step=2)
            for checkpointer, root in zip(checkpointers, roots, strict=True)
        ]
        assert dcp.resume_or_init({"n": 0}, tmp_path / "run", **tiers).how == "resumed"
        for handle in handles:
            handle.wait()
        for checkpointer in checkpointers:
            checkpointer.close()
        dist.barrier()


def test_a_stopped_keeper_makes_close_name_the_save_that_is_not_durable(tmp_path: Path) -> None:
    local = tmp_path / "local"
    checkpointer = dcp.Checkpointer(
        async_save=True, keeper={"durable_every": 9, "dir": str(local), "linger": 0.0}, timeout=5.0
    )
    checkpointer.save({"n": 1}, tmp_path / "run/step-1", step=1).wait()
    with _stopped(_keeper_of(tmp_path / "run", local)):
        with pytest.raises(
            SaveFailed, match=r"step-1 is complete in keeper\.dir, and not durable: the keeper of rank 0"
        ):
            checkpointer.close()
        assert dcp.latest(tmp_path / "run", local_dir=local) == tmp_path / "run/step-1"


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory in place of ``/dev/shm``, which a test may remove."""
    memory = Path(tempfile.mkdtemp(dir=spool._MEMORY))
    monkeypatch.setattr(spool, "_MEMORY", memory)
    yield memory
    shutil.rmtree(memory, ignore_errors=True)


def test_removed_shared_memory_is_named_and_the_next_save_is_made_without_a_keeper(
    tmp_path: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = dcp.Checkpointer(async_save=True, keeper=dcp.Keeper(), timeout=HANG)
    checkpointer.save({"n": 0}, tmp_path / "run/step-0").wait()
    keeper = _keeper_of(tmp_path / "run", None)
    os.kill(keeper, signal.SIGSTOP)
    handle = checkpointer.save({"weights": torch.ones(1000)}, tmp_path / "run/step-1")
    shutil.rmtree(spool.base_directory())
    os.kill(keeper, signal.SIGKILL)
    with pytest.raises(dcp.CheckpointError, match=rf"{memory}/.* is gone"):
        handle.wait(keeper_client._START_SECONDS / 2)
    checkpointer.save({"weights": torch.arange(1000.0)}, tmp_path / "run/step-2").wait(HANG)
    checkpointer.close()
    assert torch.equal(_weights(tmp_path / "run/step-2"), torch.arange(1000.0))
    assert re.search(rf"step-2 is saved without a keeper: {memory}/.* is gone", caplog.text)


def test_a_lazy_copy_that_is_made_again_without_a_keeper_delays_changes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(saves: KeptSaves) -> Any:
        raise NoSharedMemory("no shared memory is left")

    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    checkpointer = dcp.Checkpointer(async_save=True, staging="lazy", keeper={"linger": 0.0}, timeout=HANG)
    checkpointer.save({"model": model}, tmp_path / "run/step-0").wait()
    monkeypatch.setattr(KeptSaves, "_pool", no_memory)
    at_call = model.weight.detach().clone()
    with slow_copies(held := Gate(is_open=False)):
        handle = checkpointer.save({"model": model}, tmp_path / "run/step-1")
        assert not handle.staged()
        held.open_soon()
        optimizer.step()
        assert handle.staged()
    handle.wait()
    checkpointer.close()
    assert same_bytes(dcp.read(tmp_path / "run/step-1")["model.weight"], at_call)


def test_ctrl_c_after_the_hand_over_is_raised_when_the_save_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next save waits for the end of this one, and nothing else would say that it has ended."""
    set_handed_over = RunningSave.set_handed_over

    def interrupted(handle: RunningSave) -> None:
        monkeypatch.undo()
        signal.raise_signal(signal.SIGINT)
        set_handed_over(handle)

    monkeypatch.setattr(RunningSave, "set_handed_over", interrupted)
    checkpointer = dcp.Checkpointer(async_save=True, keeper={"linger": 0.0})
    with pytest.raises(KeyboardInterrupt):
        checkpointer.save({"weights": torch.arange(1000.0)}, tmp_path / "run/step-1")
    checkpointer.save({"weights": torch.zeros(1000)}, tmp_path / "run/step-2").wait(HANG)
    checkpointer.close()
    assert torch.equal(_weights(tmp_path / "run/step-1"), torch.arange(1000.0))
    assert torch.equal(_weights(tmp_path / "run/step-2"), torch.zeros(1000))


def test_fewer_copies_than_asked_for_are_a_warning_and_a_field_of_events(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[events.Event] = []
    unsubscribe = events.subscribe(seen.append)
    checkpointer = dcp.Checkpointer(
        async_save=True, keeper={"dir": str(tmp_path / "local"), "replicas": 1, "linger": 0.0}
    )
    for step in (1, 2):
        checkpointer.save({"n": step}, tmp_path / f"run/step-{step}", step=step).wait()
    checkpointer.close()
    unsubscribe()
    text = "saves have 0 copies, and not keeper.replicas=1: the job has 1 node"
    assert [event.copies for event in seen if isinstance(event, events.SavedLocally)] == [0, 0]
    assert [event.degraded for event in seen if isinstance(event, events.SaveFinished)] == [text, text]
    assert caplog.text.count(text) == 1


def test_an_event_says_which_tier_a_save_has_missed_and_why(tmp_path: Path) -> None:
    local, lines = tmp_path / "local", tmp_path / "events"
    local.write_text("no folder")
    checkpointer = dcp.Checkpointer(async_save=True, keeper={"dir": str(local), "linger": 0.0}, events=str(lines))
    checkpointer.save({"n": 1}, tmp_path / "run/step-1", step=1).wait()
    checkpointer.close()
    (line,) = map(json.loads, lines.read_text().splitlines())
    assert line["tier"] == "durable" and "is not kept in keeper.dir" in line["degraded"]


def test_a_second_training_with_the_same_root_and_local_dir_is_refused(tmp_path: Path) -> None:
    program = textwrap.dedent("""
        import sys, torch, dcp_plugin as dcp
        if __name__ == "__main__":
            checkpointer = dcp.Checkpointer(async_save=True, keeper={"dir": sys.argv[2], "linger": 0.0})
            try:
                checkpointer.save({"weights": torch.zeros(1000)}, f"{sys.argv[1]}/step-2", step=2).wait()
            except dcp.SaveFailed as error:
                print(error)
    """)
    root, local = tmp_path / "run", tmp_path / "local"
    (tmp_path / "second.py").write_text(program)
    checkpointer = dcp.Checkpointer(async_save=True, keeper={"dir": str(local), "linger": 0.0})
    checkpointer.save({"weights": torch.arange(1000.0)}, root / "step-1", step=1).wait()
    second = programs.run(tmp_path / "second.py", root, local)
    assert second.stdout.startswith(f"another training on {socket.gethostname()} (pid {os.getpid()}) saves to the same")
    assert dcp.latest(root, local_dir=local) == root / "step-1"
    checkpointer.close()
    second = programs.run(tmp_path / "second.py", root, local)
    assert (second.returncode, second.stdout) == (0, ""), second.stderr
    assert dcp.latest(root) == root / "step-2"


@dataclass
class _HandedOver:
    """A save that no keeper has begun with: a copy of its spool."""

    spool: Spool
    token: str
    state: dict[str, torch.Tensor]

    def copied(self, to: Path) -> _HandedOver:
        shutil.copytree(self.spool.folder, to)
        return replace(self, spool=Spool(to))

    def as_saved_to(
        self, path: Where, local_dir: Path | None, token: str = "", fill: float | None = None, **keeper: Any
    ) -> str:
        """Put it into the spool as another save."""
        token = token or new_token(time.time())
        journal = Journal(self.spool)
        job = journal.job(self.token, 0)
        config = dcp.CheckpointConfig.merge(job.config, keeper={"dir": local_dir, **keeper}, timeout=5.0)
        items = plain.decode(job.items)
        if fill is not None:
            known = [item.data for item in items.decoded(self.spool)]
            given = [torch.full((1000,), fill) if isinstance(data, torch.Tensor) else data for data in known]
            items = replace(items, slab=np.full_like(items.slab, -1), others=dict(enumerate(given)))
        job = replace(
            job, token=token, path=path, options=options_of(path) or None, config=config, items=plain.encode(items)
        )
        journal.hand_over(job, None)
        journal.go(replace(journal.go_of(self.token), token=token))
        return token

    def alone(self) -> None:
        Journal(self.spool).forget(self.token)


def test_a_keeper_writes_tensors_of_any_class(tmp_path: Path) -> None:
    class Subclass(torch.Tensor):
        """Not known to the keeper."""

    two, subclass = TwoTensor(torch.randn(4, 3), torch.randn(4, 3)), torch.randn(5).as_subclass(Subclass)
    checkpointer = dcp.Checkpointer(async_save=True, keeper={"linger": 0.5})
    checkpointer.save({"two": two, "subclass": subclass}, tmp_path / "ck").wait()
    loaded = {"two": TwoTensor(torch.zeros(4, 3), torch.zeros(4, 3)), "subclass": torch.zeros(5)}
    checkpointer.load(loaded, tmp_path / "ck")
    checkpointer.close()
    assert same_bytes(loaded["two"].a, two.a) and same_bytes(loaded["two"].b, two.b)
    assert same_bytes(loaded["subclass"], subclass.as_subclass(torch.Tensor))


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> tuple[_HandedOver, list[str]]:
    """One training through the deaths of its keeper; and what was wrong with it."""
    root = tmp_path_factory.mktemp("training")
    wrong: list[str] = []
    checkpointer = dcp.Checkpointer(async_save=True, keeper={"linger": 1.0})
    checkpointer.save({"weights": torch.arange(1000.0)}, root / "step-1", step=1).wait()
    spool = Spool.of(root.resolve(), None)
    first = spool.pid()
    assert first is not None
    _wait(lambda: not spool.names(".job"), "the first save is still in the spool")  # it ends, and then it goes
    os.kill(first, signal.SIGSTOP)
    state = {"weights": torch.arange(1000.0) + 2}
    handle = checkpointer.save(state, root / "step-2", step=2)
    token = spool.names(".go")[-1].removesuffix(".go")
    copy = tmp_path_factory.mktemp("spool") / "copy"
    shutil.copytree(spool.folder, copy, ignore=shutil.ignore_patterns("keeper.*", "*.state", "*.client"))
    state["weights"] += 1
    os.kill(first, signal.SIGKILL)  # with a save in flight
    handle.wait()
    if not torch.equal(_weights(root / "step-2"), torch.arange(1000.0) + 2):
        wrong.append("step-2 has other bytes than were handed over")
    second = spool.pid()
    assert second is not None and second != first
    os.kill(second, signal.SIGKILL)  # idle
    try:
        checkpointer.save(state, root / "step-3", step=3).wait()
    except SaveFailed as error:
        wrong.append(str(error))
    third = spool.pid()
    checkpointer.close()
    again = dcp.Checkpointer(async_save=True, keeper={"linger": 1.0})  # while that keeper ends
    try:
        again.save(state, root / "step-4", step=4).wait()
    except SaveFailed as error:
        wrong.append(str(error))
    again.close()
    _wait(lambda: not spool.is_kept(), f"the keeper lives on, after {third}")
    if any(spool.names("")):
        wrong.append(f"{spool.names('')} are left")
    return _HandedOver(Spool(copy), token, {"weights": torch.arange(1000.0) + 2}), wrong


@pytest.fixture
def handed_over(training: tuple[_HandedOver, list[str]], tmp_path: Path) -> _HandedOver:
    return training[0].copied(tmp_path / "spool")


def test_a_training_goes_on_through_deaths_and_ends_of_its_keeper(training: tuple[_HandedOver, list[str]]) -> None:
    assert training[1] == []


def _coordinator(spool: Spool) -> tuple[Coordinator, Node]:
    node = Node(Journal(spool))
    return Coordinator(node, lambda: True), node


def _ended(node: Node, token: str) -> End:
    end = node.journal.wait(token, "end", HANG).end
    assert isinstance(end, End), f"{token} has not ended"
    return end


def test_a_host_copy_is_free_only_when_the_save_is_never_written_from_it_again(
    handed_over: _HandedOver, tmp_path: Path
) -> None:
    token = handed_over.as_saved_to(tmp_path / "run/a", tmp_path / "local")
    node = Node(Journal(handed_over.spool))
    node.write(token, [0], None)
    assert not node.journal.wait(token, "written", 0.0).written
    node.free(token)
    assert node.journal.wait(token, "written", 0.0).written
    Node(Journal(handed_over.spool)).write(token, [0], None)  # another keeper, which finds it written
    with pytest.raises(SaveFailed, match="another save uses its host copy"):
        node.write(token, [0], tmp_path)


def test_a_save_for_which_local_dir_has_no_room_at_the_end_goes_to_its_path(
    handed_over: _HandedOver, tmp_path: Path
) -> None:
    token = handed_over.as_saved_to(tmp_path / "run/a", tmp_path / "local")
    handed_over.alone()
    coordinator, node = _coordinator(handed_over.spool)
    (
        node.local_checkpoints(node.journal.job(token, 0)).make(token) / "dcp_plugin.index"
    ).mkdir()  # as if there were no room for it
    coordinator.begin()
    end = _ended(node, token)
    assert end.published and not end.local and "goes straight to its path" in node.journal.state(token).messages[0]
    assert torch.equal(_weights(tmp_path / "run/a"), handed_over.state["weights"])
    assert dcp.inspect(tmp_path / "run/a").time == time_of(token), "a later save that is drained before it stays newer"


def test_a_save_that_reaches_a_bucket_late_stays_older_than_later_local_saves(
    handed_over: _HandedOver, bucket: Bucket, tmp_path: Path
) -> None:
    path = as_path(f"{bucket.url}/run/a")
    token = handed_over.as_saved_to(path, tmp_path / "local", new_token(time.time() - 100.0))
    handed_over.alone()
    coordinator, node = _coordinator(handed_over.spool)
    coordinator.begin()
    assert _ended(node, token).published
    assert 0.0 <= time_of(token) - dcp.inspect(path).time < 0.001  # names in a store have milliseconds


@pytest.mark.parametrize("tier", ["none", "local"])
def test_no_keeper_that_wakes_up_publishes_a_save_that_the_ranks_have_revoked(
    handed_over: _HandedOver, place: Where, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: str
) -> None:
    """It was stopped after it had looked for that last."""
    path = place / "run" / "a"
    token = handed_over.as_saved_to(path, tmp_path / "local" if tier == "local" else None)
    handed_over.alone()
    coordinator, node = _coordinator(handed_over.spool)
    publish = Publication.compose_and_commit

    def after_that_was_revoked(*args: Any) -> Summary:
        medium_of(path).revoke(path, node.journal.state(token).reserved)
        return publish(*args)

    monkeypatch.setattr(Publication, "compose_and_commit", after_that_was_revoked)
    coordinator.begin()
    end = _ended(node, token)
    assert (end.published, end.has_failed) == (False, tier == "none")
    assert dcp.latest(path.parent) is None


def test_a_save_whose_keeper_died_after_it_had_published_it_is_published_by_the_next(
    handed_over: _HandedOver, tmp_path: Path
) -> None:
    token = handed_over.as_saved_to(tmp_path / "run/a", None)
    handed_over.alone()
    for_next = handed_over.copied(tmp_path / "for the next keeper")
    for handed in (handed_over, for_next):
        coordinator, node = _coordinator(handed.spool)
        coordinator.begin()
        end = _ended(node, token)
        assert end.published and end.error is None
    assert torch.equal(_weights(tmp_path / "run/a"), handed_over.state["weights"])


def test_a_save_that_gives_way_to_newer_ones_says_that_its_path_lacks_it(
    handed_over: _HandedOver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise OSError(errno.EIO, "the storage is down")

    monkeypatch.setattr("dcp_plugin.core.storage.part_writer.Publication.reserve", fail)
    tokens = [handed_over.as_saved_to(tmp_path / f"run/{number}", tmp_path / "local") for number in range(5)]
    handed_over.alone()
    coordinator, node = _coordinator(handed_over.spool)
    coordinator.begin()
    end = _ended(node, tokens[0])
    assert (end.published, end.local, end.error) == (False, True, None)
    assert "is in keeper.dir, and was not copied to its path" in end.degraded


def test_a_save_whose_copies_fail_while_a_newer_one_waits_says_so_when_it_ends(
    handed_over: _HandedOver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(self: Coordinator, save: Save, peer: Peer, what: str, args: tuple[Any, ...]) -> Any:
        if what == "replicate":
            raise ConnectionResetError("its keeper has just ended")
        return getattr(self._node, what)(save.token, *args) if peer.rank == 0 else {}

    monkeypatch.setattr(Coordinator, "_ask", ask)
    monkeypatch.setattr(Save, "names_of", lambda save, node: [])
    keeper: dict[str, Any] = {"replicas": 1, "durable_every": None}
    tokens = [handed_over.as_saved_to(tmp_path / f"run/{number}", tmp_path / "local", **keeper) for number in (1, 2)]
    journal = Journal(handed_over.spool)
    for token in tokens:
        go = journal.go_of(token)
        journal.go(replace(go, peers=[*go.peers, Peer(1, "another node", "host", ("127.0.0.1", 0))]))
    handed_over.alone()
    leader, node = _coordinator(handed_over.spool)
    leader.begin()
    for number, token in enumerate(tokens, start=1):
        end = _ended(node, token)
        assert (end.local, end.copies, end.error) == (True, 0, None)
        assert f"run/{number} has no copies on other nodes: its keeper has just ended" in end.degraded
        assert end.degraded in node.journal.state(token).messages


def test_a_save_that_ends_while_it_is_looked_up_is_not_lost(
    handed_over: _HandedOver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, journal = handed_over.as_saved_to(tmp_path / "run/a", None), Journal(handed_over.spool)
    ranks_of = journal.ranks_of

    def after_the_end(token: str) -> list[int]:
        journal.end(token, End(published=True, local=False))
        return ranks_of(token)

    monkeypatch.setattr(journal, "ranks_of", after_the_end)
    assert journal.wait(token, "written", 0.0).end == End(published=True, local=False)


def test_a_rank_that_asks_for_the_newest_save_while_it_is_reopened_for_another_rank_waits_for_it(
    handed_over: _HandedOver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = handed_over.as_saved_to(tmp_path / "run/a", tmp_path / "local", durable_every=5)
    handed_over.alone()
    coordinator, node = _coordinator(handed_over.spool)
    coordinator.begin()
    assert (_ended(node, token).published, _ended(node, token).is_final) == (False, False)
    reopen, is_reopened, may_go_on = node.reopen, threading.Event(), threading.Event()

    def slowly(token: str) -> None:
        reopen(token)
        is_reopened.set()
        may_go_on.wait(HANG)

    monkeypatch.setattr(node, "reopen", slowly)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(coordinator.drain_newest, token)
        assert is_reopened.wait(HANG)
        coordinator.begin()  # as the keeper does twice a second
        second = pool.submit(coordinator.drain_newest, token)
        assert wait([second], 0.2).not_done, "it is asked while the first is not told yet"
        may_go_on.set()
        assert (first.result(), second.result()) == (True, True)
    end = _ended(node, token)
    assert end.published and end.local and end.local_seconds is not None
    assert torch.equal(_weights(tmp_path / "run/a"), handed_over.state["weights"])


def test_an_older_save_does_not_replace_a_newer_one_that_has_overtaken_it(
    handed_over: _HandedOver, tmp_path: Path
) -> None:
    older, newer = (handed_over.as_saved_to(tmp_path / "run/a", None, fill=value) for value in (1.0, 2.0))
    handed_over.alone()
    late = handed_over.spool.folder / f"{older}.go"
    late.rename(tmp_path / "late")
    coordinator, node = _coordinator(handed_over.spool)
    coordinator.begin()
    assert _ended(node, newer).published
    (tmp_path / "late").rename(late)
    coordinator, node = _coordinator(handed_over.spool)  # of a keeper that has only what is in files
    coordinator.begin()
    assert "An older save does not replace it" in str(_ended(node, older).error)
    assert torch.equal(_weights(tmp_path / "run/a"), torch.full((1000,), 2.0))


def test_saves_begin_in_the_order_in_which_they_were_handed_over(handed_over: _HandedOver, tmp_path: Path) -> None:
    tokens = [handed_over.as_saved_to(tmp_path / "run/a", None, fill=float(value)) for value in range(4)]
    handed_over.alone()
    coordinator, node = _coordinator(handed_over.spool)
    coordinator.begin()
    assert all(_ended(node, token).published for token in tokens)
    assert torch.equal(_weights(tmp_path / "run/a"), torch.full((1000,), 3.0))


def test_a_file_that_took_the_place_of_a_drained_one_is_not_taken_for_it(
    handed_over: _HandedOver, tmp_path: Path
) -> None:
    local = tmp_path / "local"
    first = handed_over.as_saved_to(tmp_path / "run/a", local, fill=1.0)
    second = handed_over.as_saved_to(tmp_path / "run/b", local, fill=2.0)
    node = Node(Journal(handed_over.spool))
    folders = []
    for token in (first, second):
        files = node.write(token, [0], None)[0].files
        folders.append((node.local_checkpoints(node.journal.job(token, 0)).folder_of(token), next(iter(files))))
    (old, old_name), (new, new_name) = folders
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    node.drain(first, 0, [old_name], tmp_path / "a", "x")
    data = (new / new_name).read_bytes()
    (new / new_name).unlink()
    with (old / old_name).open("r+b") as file:  # a new file with the inode of the old one
        file.write(data)
    (old / old_name).rename(new / new_name)
    node.drain(second, 0, [new_name], tmp_path / "b", "x")
    [copied] = (tmp_path / "b").glob("*.distcp")
    assert copied.read_bytes() == data


def test_what_cannot_be_read_ends_and_keeps_nobody_waiting(handed_over: _HandedOver) -> None:
    handed_over.spool.put(f"{handed_over.token}.0.job", b"of another version")
    coordinator, node = _coordinator(handed_over.spool)
    coordinator.begin()
    end = _ended(node, handed_over.token)
    assert isinstance(end.error, SaveFailed) and not end.published
    assert node.journal.in_flight() == []
    with pytest.raises(SaveFailed, match="this keeper has no record"):
        node.journal.wait("f" * 24, "end", HANG)


def test_a_save_that_kills_its_keepers_is_given_up(handed_over: _HandedOver) -> None:
    Journal(handed_over.spool).change(handed_over.token, tries=5)
    coordinator, node = _coordinator(handed_over.spool)
    coordinator.begin()
    assert "keepers have died while they wrote this save" in str(_ended(node, handed_over.token).error)


def test_a_neighbour_can_put_nothing_beside_the_folder_of_a_save(handed_over: _HandedOver, tmp_path: Path) -> None:
    token = handed_over.as_saved_to(tmp_path / "run/a", tmp_path / "local")
    node = Node(Journal(handed_over.spool))
    node.local_checkpoints(node.journal.job(token, 0)).make(token)
    ours, theirs = map(Channel, socket.socketpair())
    with closing(ours), closing(theirs):
        for name in ("../x", "/tmp/x", "..", "a/../../x"):
            node.put(theirs, token, name, 4, None)
            answer, error = ours.receive()
            assert answer == "error" and isinstance(error, SaveFailed), name
        node.put(theirs, token, "x", 4, ("../..", "y"))
        assert ours.receive()[0] == "error"


def test_a_keeper_whose_spool_somebody_has_deleted_ends(handed_over: _HandedOver, tmp_path: Path) -> None:
    handed_over.alone()
    process = start_keeper(handed_over.spool, 600.0)
    assert process is not None
    _wait(lambda: (handed_over.spool.folder / "keeper.sock").exists(), "no keeper has come")
    # At once, as the keeper deletes what nobody uses in the same moment.
    shutil.rmtree(handed_over.spool.folder.rename(tmp_path / "deleted"))
    assert process.wait(HANG) == 0


def test_the_parts_of_all_nodes_in_one_folder_are_a_checkpoint(handed_over: _HandedOver, tmp_path: Path) -> None:
    token = handed_over.as_saved_to(tmp_path / "run/a", tmp_path / "local")
    handed_over.alone()
    coordinator, node = _coordinator(handed_over.spool)
    coordinator.begin()
    assert node.journal.wait(token, "local", HANG).local
    folder = node.local_checkpoints(node.journal.job(token, 0)).folder_of(token)
    assert torch.equal(_weights(folder), handed_over.state["weights"])
    assert _ended(node, token).published
