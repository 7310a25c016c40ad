"""A new training meets the journal and the keeper of another version: it refuses them by name.

It neither publishes nor deletes the saves in the journal. Another version is a copy of this package with another
number.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp_plugin as dcp
from dcp_plugin.core.paths import resolved
from dcp_plugin.tiers import keeper_client, spool
from dcp_plugin.tiers.spool import FORMAT_VERSION, Spool
from tests import programs
from tests.compare import assert_same
from tests.limits import HANG
from tests.places import bytes_in, names_in

OTHER = FORMAT_VERSION + 98
REFUSAL = f"another version of dcp_plugin (format {OTHER}; this one has format {FORMAT_VERSION})"
KEPT: dict[str, Any] = {"async_save": True, "keeper": dcp.Keeper()}


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of this process's journals, for this test alone.

    Another test may have a journal of the same root. The name is short enough for sockets in the folder.
    """
    with tempfile.TemporaryDirectory(dir=spool._MEMORY, prefix="frozen-") as folder:
        monkeypatch.setattr(spool, "_MEMORY", Path(folder))
        yield Path(folder) / f"dcp_plugin-{os.geteuid()}"
        for keeper in keeper_client._started:
            if str(folder) in str(keeper.args):
                keeper.wait(HANG)


def _other_journal(memory: Path, root: Path, version: int | None = OTHER) -> Path:
    """A journal of another version, where today's code would have one of the same folder of checkpoints."""
    folder = Spool.of(resolved(root), None).folder
    folder.mkdir()
    files = {"root": str(root.resolve()), "18ead246.go": "", "18ead246.0.job": "a save", "slab-0-479ac934": "tensors"}
    for name, content in (files | ({} if version is None else {"format": str(version)})).items():
        (folder / name).write_text(content)
    return folder


@pytest.mark.parametrize(("version", "shown"), [(OTHER, OTHER), (FORMAT_VERSION - 1,) * 2, (None, "unknown")])
def test_a_journal_of_another_version_is_refused_by_name_and_keeps_every_file(
    memory: Path, tmp_path: Path, version: int | None, shown: object, caplog: pytest.LogCaptureFixture
) -> None:
    folder = _other_journal(memory, tmp_path, version)
    before = bytes_in(folder)
    refusal = f"another version of dcp_plugin (format {shown}; this one has format {FORMAT_VERSION})"
    state = {"weights": torch.ones(10)}
    assert dcp.resume_or_init(state, tmp_path, **KEPT).how == "fresh"
    assert str(folder) in caplog.text
    assert refusal in caplog.text
    caplog.clear()
    checkpointer = dcp.Checkpointer(**KEPT)
    checkpointer.save(state, tmp_path / "step-1", step=1).wait()
    checkpointer.close()
    assert f"step-1 is saved without a keeper: {folder}" in caplog.text
    assert refusal in caplog.text
    assert dcp.verify(tmp_path / "step-1").ok
    assert names_in(tmp_path) == ["step-1"]
    assert bytes_in(folder) == before


def test_saves_that_only_a_keeper_can_make_are_refused_by_name(memory: Path, tmp_path: Path) -> None:
    checkpointer = dcp.Checkpointer(async_save=True, keeper={"dir": str(tmp_path / "local"), "durable_every": None})
    folder = Spool.of(resolved(tmp_path / "run"), str(tmp_path / "local")).folder
    folder.mkdir()
    (folder / "format").write_text(str(OTHER))
    with pytest.raises(dcp.SaveFailed, match=f"{folder} is the journal of another version"):
        checkpointer.save({"n": 1}, tmp_path / "run" / "step-1", step=1)
    checkpointer.close()
    assert (folder / "format").read_text() == str(OTHER)


def test_a_keeper_of_another_version_ends_at_once_and_says_why(memory: Path, tmp_path: Path) -> None:
    """The package was upgraded under a training, which starts a keeper in place of one that died."""
    folder = _other_journal(memory, tmp_path)
    before = bytes_in(folder)
    ended = programs.run("-m", "dcp_plugin.tiers", folder, 0, cwd=programs.ROOT)
    assert ended.returncode == 1
    assert REFUSAL in ended.stderr
    assert str(folder) in ended.stderr
    assert {name: data for name, data in bytes_in(folder).items() if name != "keeper.lock"} == before


def _other_package(folder: Path, memory: Path) -> None:
    """A copy of this package with another number."""
    package = Path(dcp.__file__).parent
    shutil.copytree(package, folder / "dcp_plugin", ignore=shutil.ignore_patterns("__pycache__"))
    module = folder / "dcp_plugin" / "tiers" / "spool.py"
    text = module.read_text()
    for old, new in (
        (f"\nFORMAT_VERSION = {FORMAT_VERSION}\n", f"\nFORMAT_VERSION = {OTHER}\n"),
        ('\n_MEMORY = Path("/dev/shm")\n', f'\n_MEMORY = Path("{memory.parent}")\n'),
    ):
        assert old in text
        text = text.replace(old, new)
    module.write_text(text)


def test_a_lingering_keeper_of_another_version_is_left_alone_and_publishes_its_saves(
    memory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its training was killed. It is stopped while the new training runs, and goes on later."""
    program = textwrap.dedent("""
        import os, signal, sys, torch, dcp_plugin as dcp
        if __name__ == "__main__":
            checkpointer = dcp.Checkpointer(async_save=True, keeper={"linger": 0.0})
            checkpointer.save({"weights": torch.arange(10.0)}, f"{sys.argv[1]}/step-1", step=1).wait()
            keeper = checkpointer._writer.saves.client.spool.pid()
            os.kill(keeper, signal.SIGSTOP)
            checkpointer.save({"weights": torch.arange(10.0) + 1}, f"{sys.argv[1]}/step-2", step=2)
            print(keeper, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
    """)
    script, root = tmp_path / "other" / "train.py", tmp_path / "run"
    _other_package(script.parent, memory)
    script.write_text(program)  # which finds the package beside it first
    ended = programs.run(script, root)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    keeper = int(ended.stdout)
    watch = os.pidfd_open(keeper)
    try:
        (folder,) = (path for path in memory.iterdir() if path.name[0] != ".")
        before = bytes_in(folder)
        state = {"weights": torch.zeros(10)}
        start = dcp.resume_or_init(state, root, **KEPT)
        assert (start.how, start.step) == ("resumed", 1)
        checkpointer = dcp.Checkpointer(**KEPT)
        checkpointer.save(state, root / "step-3", step=3).wait()
        checkpointer.close()
        assert caplog.text.count(f"{folder} is the journal of {REFUSAL}") == 2
        assert bytes_in(folder) == before
        os.kill(keeper, signal.SIGCONT)
        select.select([watch], [], [])  # until it has ended
        assert_same(dcp.read(root / "step-2"), {"weights": torch.arange(10.0) + 1})
        assert dcp.verify(root / "step-3").ok
    finally:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(watch, signal.SIGKILL)
        os.close(watch)
