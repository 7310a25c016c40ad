"""Which checkpoint is the newest, which one to resume from, and which ones go."""

from __future__ import annotations

import functools
import json
import os
import pickle
import re
import shutil
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

import dcp_plugin as dcp
from dcp_plugin.core.format import index_file
from dcp_plugin.core.format.summary import Summary
from dcp_plugin.core.media import lease, medium_of
from dcp_plugin.core.media.disk import commit
from dcp_plugin.core.media.places import WORKSPACE
from dcp_plugin.core.paths import Where, as_path
from dcp_plugin.core.runs import deletion
from dcp_plugin.core.storage import part_writer, published
from tests import launch
from tests.dying import die_at
from tests.foreign import LIGHTNING, LIGHTNING_WEIGHTS, OPTIMIZER, WEIGHTS
from tests.forge import change_summary
from tests.launch import on_ranks
from tests.limits import HANG
from tests.object_server import Bucket
from tests.objects import attack
from tests.places import bytes_in, delete_file, is_tidy, names_in, stock_writer


def _save(path: Any, n: int, **options: object) -> Any:
    dcp.save({"n": n}, path, step=n, **options)
    return path


def test_latest_is_the_one_published_last_wherever_it_lies(place: Where) -> None:
    _save(place / "logs" / "version_1" / "checkpoints" / "step=9.ckpt", 9)
    newest = _save(place / "logs" / "version_0" / "checkpoints" / "step=2.ckpt", 2)
    assert dcp.latest(place) == newest
    if isinstance(place, Path):
        os.utime(place / "logs" / "version_1" / "checkpoints" / "step=9.ckpt")  # touched or copied: no change
        assert dcp.latest(place) == newest
    assert dcp.latest(newest) == newest, "a checkpoint is its own latest"
    assert [state.step for state in dcp.list_checkpoints(place)] == [9, 2]


def test_latest_of_nothing_is_none(place: Where) -> None:
    assert dcp.latest(place) is None
    assert dcp.latest(place / "not there") is None


def test_a_configuration_prints_as_its_difference_and_the_presets_are_of_three_places() -> None:
    presets = {name: dcp.CheckpointConfig.preset(name, io={"threads": 4}) for name in ("local", "cluster", "bucket")}  # type: ignore[arg-type]
    assert {name: str(preset) for name, preset in presets.items()} == {
        "local": "CheckpointConfig(async_save=True, io=IO(threads=4), keep_last=3)",
        "cluster": "CheckpointConfig(async_save=True, finish_on_sigterm=True, io=IO(threads=4), keep_last=3)",
        "bucket": "CheckpointConfig(async_save=True, keeper=Keeper(), io=IO(threads=4), keep_last=3)",
    }
    assert repr(dcp.CheckpointConfig(storage_options={"secret": "abc"})) == "CheckpointConfig()"
    with pytest.raises(ValueError, match="'local', 'cluster', 'bucket', not 's3'"):
        dcp.CheckpointConfig.preset("s3")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="did you mean 'keep_last'"):
        dcp.CheckpointConfig.preset("local", keep_lats=1)


def test_a_mapping_changes_fields_of_a_group_and_an_instance_replaces_the_group() -> None:
    base = dcp.CheckpointConfig(keeper=dcp.Keeper(dir="/node", keep=3), io={"threads": 4})  # type: ignore[arg-type]
    merged = dcp.CheckpointConfig.merge(base, keeper={"replicas": 1}, io={"verify": False})
    assert merged.keeper == dcp.Keeper(dir="/node", keep=3, replicas=1)
    assert merged.io == dcp.IO(threads=4, verify=False)
    assert dcp.CheckpointConfig.merge(base, keeper=dcp.Keeper(), io=dcp.IO(verify=False)) == dcp.CheckpointConfig(
        keeper=dcp.Keeper(), io=dcp.IO(verify=False)
    )
    assert dcp.CheckpointConfig.merge(base, keeper=None).keeper is None
    assert dcp.Checkpointer(keeper={"linger": 1.0}).config.keeper == dcp.Keeper(linger=1.0)
    assert dcp.CheckpointConfig.preset("bucket", keeper={"dir": "/node"}).keeper == dcp.Keeper(dir="/node")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dcp.IO(thread=4), r"'io.thread' \(did you mean 'io.threads'\?\)"),  # type: ignore[call-arg]
        (lambda: dcp.Checkpointer(keeper={"linger_for": 4}), r"'keeper.linger_for' \(did you mean 'keeper.linger'\?\)"),
        (lambda: dcp.Checkpointer(threads=4), r"'threads' \(did you mean 'io.threads'\?\)"),
        (lambda: dcp.Checkpointer(io=4), "io must be an IO or a mapping of its fields, got 4"),
        (lambda: dcp.Checkpointer(keeper=True), "keeper must be a Keeper, a mapping of its fields or None, got True"),
        (lambda: dcp.Keeper(keep="2"), "keeper.keep must be a whole number, got '2'"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_field_of_a_group_is_told_with_its_full_name(make: Callable[[], object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make()


@pytest.mark.parametrize("rules", [{"keep_last": 1}, {"keep_last": dcp.Retention(newest=1, every_steps=10)}])
def test_a_rule_that_keeps_only_the_newest_is_refused_for_saves_in_the_background(rules: dict[str, Any]) -> None:
    dcp.CheckpointConfig(**rules)
    with pytest.raises(ValueError, match="keep at least 2"):
        dcp.CheckpointConfig(async_save=True, **rules)


def test_a_damaged_summary_is_passed_over_with_its_reason(tmp_path: Path) -> None:
    good = _save(tmp_path / "a", 1)
    (_save(tmp_path / "b", 2) / "dcp_plugin.json").write_text("{")
    assert dcp.latest(tmp_path) == good
    assert "damaged" in next(state.reason for state in dcp.list_checkpoints(tmp_path) if not state.committed)


@pytest.mark.parametrize("name", [".metadata", "dcp_plugin.json", "dcp_plugin.index"])
def test_a_copy_that_misses_one_file_is_no_checkpoint(tmp_path: Path, name: str) -> None:
    path = _save(tmp_path / "ck", 1)
    (path / name).unlink()
    assert dcp.latest(tmp_path) is None
    with pytest.raises(dcp.CheckpointIncomplete, match="latest"):
        dcp.load({"n": 0}, path)


def test_resume_modes(place: Where) -> None:
    assert dcp.resolve_resume("auto", place) is None
    with pytest.raises(dcp.CheckpointNotFound, match="resume=must"):
        dcp.resolve_resume("must", place)
    path = _save(place / "ck", 1)
    assert dcp.resolve_resume("auto", place) == path
    assert dcp.resolve_resume("must", place) == path
    assert dcp.resolve_resume("never", place) is None
    assert dcp.resolve_resume(path, "elsewhere") == path
    with pytest.raises(dcp.CheckpointNotFound, match="does not exist"):
        dcp.resolve_resume(place / "typo", place)


def test_must_names_what_was_passed_over(place: Where) -> None:
    delete_file(_save(place / "ck", 1) / ".metadata")
    with pytest.raises(dcp.CheckpointNotFound, match=r"Passed over: .*ck"):
        dcp.resolve_resume("must", place)


def test_a_plain_file_can_be_named_to_resume_from(tmp_path: Path) -> None:
    (tmp_path / "single.ckpt").write_bytes(b"a Lightning file")
    assert dcp.resolve_resume(tmp_path / "single.ckpt", tmp_path) == tmp_path / "single.ckpt"


def test_keep_last_deletes_the_oldest_of_ours_and_nothing_else(place: Where) -> None:
    dcp.save({"n": 1}, place / "notes" / "ck")
    stock.save({"n": torch.ones(1)}, storage_writer=stock_writer(place / "foreign"))
    for n in range(5):
        _save(place / f"step-{n}", n, keep_last=2)
    found = [one.path.name for one in medium_of(place).entries(place)]
    assert [name for name in found if name != WORKSPACE] == ["foreign", "notes", "step-3", "step-4"]
    assert {state.step for state in dcp.list_checkpoints(place) if state.step} == {3, 4}


def test_keep_last_keeps_the_other_parts_of_the_same_step(place: Where) -> None:
    for step in (1, 2):
        for part in ("model", "optimizer"):
            dcp.save({"n": step}, place / f"checkpoint-{step}" / part, step=step, keep_last=1)
    for step in (3, 3, 4):
        dcp.save({"n": step}, place / f"step-{step}", step=step, keep_last=1)
    assert all(dcp.verify(place / f"checkpoint-{n}" / part).ok for n in (1, 2) for part in ("model", "optimizer"))
    assert dcp.latest(place) is not None and not medium_of(place).kind(place / "step-3")


def test_keep_last_keeps_all_parts_that_were_saved_without_a_step(place: Where) -> None:
    for step in (1, 2):
        for part in ("model", "optimizer"):
            dcp.save({"n": step}, place / f"checkpoint-{step}" / part, keep_last=1)
    assert all(dcp.verify(place / f"checkpoint-{n}" / part).ok for n in (1, 2) for part in ("model", "optimizer"))


def test_a_policy_keeps_what_any_of_its_rules_keeps_after_each_save(place: Where) -> None:
    policy = dcp.Retention(newest=1, every_steps=4, best=("loss", "min", 1))
    with closing(dcp.Checkpointer(keep_last=policy)) as checkpointer:
        for step, loss in enumerate((0.5, 0.4, 0.1, 0.3, 0.2, 0.9, 0.8)):
            checkpointer.save({"n": step}, place / f"step-{step}", step, metrics={"loss": loss})
    assert [state.step for state in dcp.list_checkpoints(place)] == [0, 2, 4, 6]


def test_a_policy_reads_the_checkpoints_of_a_bucket_at_the_same_time(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = as_path(f"{bucket.url}/run")
    for step in range(4):
        dcp.save({"n": step}, run / f"step-{step}", step=step)
    all_of_them, read_summary = threading.Barrier(4), deletion.read_summary

    def meet(path: Where) -> Summary | None:
        all_of_them.wait(HANG)
        return read_summary(path)

    monkeypatch.setattr(deletion, "read_summary", meet)
    deletion.prune(run / "step-3", dcp.Retention(every_steps=2))
    assert [state.step for state in dcp.list_checkpoints(run)] == [0, 2, 3]


def test_a_policy_selects_neither_the_newest_nor_what_is_torn() -> None:
    def state(name: str, time: float, committed: bool = True) -> dcp.tools.CheckpointState:
        return dcp.tools.CheckpointState(Path("/run", name), committed, step=int(time), time=time)

    states = [state("oldest", 0), state("old", 1), state("new", 2), state("torn", 3, False)]
    assert [one.path.name for one in dcp.Retention(newest=1).select(states)] == ["old", "oldest"]
    assert [one.path.name for one in dcp.Retention(every_steps=7).select(states[1:])] == ["old"]
    assert dcp.Retention(younger_than=1e12).select(states) == dcp.Retention(newest=1).select(states[:1]) == []


@pytest.mark.parametrize("given", [{}, {"newest": 0}, {"every_steps": -1}, {"best": ("loss", "lowest", 1)}])
def test_rules_without_meaning_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"say what to keep|from 1 on|'min' or 'max'"):
        dcp.Retention(**given)


def _lightning(path: Path, time: int = 1) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(LIGHTNING, path)
    return _at(path, time)


def _folder(path: Path, *files: str, time: int = 1) -> Path:
    path.mkdir(parents=True)
    for name in files:
        if name.endswith(".safetensors"):
            save_file(WEIGHTS, path / name)
        elif name.endswith((".json", ".pkl")):
            _at_text(path / name, time)
        else:
            torch.save(OPTIMIZER, path / name)
    return path


def _trainer(path: Path, time: int = 1) -> Path:
    return _folder(path, "model.safetensors", "optimizer.pt", "trainer_state.json", time=time)


def _accelerate(path: Path, time: int = 1) -> Path:
    return _folder(path, "model.safetensors", "optimizer.bin", "random_states_0.pkl", time=time)


def _at(path: Path, time: int) -> Path:
    os.utime(path, (time, time))
    return path


def _at_text(path: Path, time: int) -> None:
    path.write_text("{}")
    _at(path, time)


def _said(root: Path, resume: str = "auto") -> str:
    """Nothing is resumed from, and this warning says what is there."""
    with pytest.warns(UserWarning, match="the training starts fresh: nothing below") as said:
        assert dcp.resolve_resume(resume, root) is None
    return str(said[0].message)


def test_what_the_stock_tools_saved_is_resumed_from_under_any_name(tmp_path: Path) -> None:
    for time, make in enumerate([_lightning, _trainer, _accelerate, _lightning, _trainer], start=1):
        path = make(tmp_path / "logs" / f"{time} any name", time)
        assert dcp.latest(tmp_path) == dcp.resolve_resume("must", tmp_path) == path, "the newest"
    ours = _save(tmp_path / "logs" / "ours", 1)
    assert dcp.latest(tmp_path) == ours
    assert dcp.latest(_lightning(tmp_path / "alone" / "last.ckpt").parent) == tmp_path / "alone" / "last.ckpt"
    (tmp_path / "alone" / "last.ckpt").rename(tmp_path / "elsewhere")
    (tmp_path / "alone" / "link").symlink_to(tmp_path / "elsewhere")
    assert dcp.latest(tmp_path / "alone") is None, "links are not followed"


def test_numbers_tell_the_newest_of_a_run_that_was_copied(tmp_path: Path) -> None:
    for number, time in ((9, 3), (10, 1), (100, 2)):
        _trainer(tmp_path / "trainer" / f"checkpoint-{number}", time)
        _accelerate(tmp_path / "accelerate" / f"checkpoint_{number}", time)
    assert dcp.latest(tmp_path / "trainer").name == "checkpoint-100"  # type: ignore[union-attr]
    assert dcp.latest(tmp_path / "accelerate").name == "checkpoint_100"  # type: ignore[union-attr]


def test_what_plain_pytorch_cannot_restore_says_the_way_out(tmp_path: Path) -> None:
    """Nothing starts anew beside it, and where it is what the run starts from, it is no checkpoint of the run."""
    path = _lightning(tmp_path / "last.ckpt")
    model = nn.ParameterDict({"w": torch.ones(3)})
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(dcp.CheckpointMismatch, match="'optim' is not in the checkpoint") as raised:
        dcp.resume_or_init({"model": model, "optim": optimizer}, tmp_path)
    assert "resume='never', init_from=PATH" in raised.value.__notes__[0]
    start = dcp.resume_or_init({"model": model, "optim": optimizer}, tmp_path, init_from=path)
    assert (start.how, model["w"].tolist()) == ("warm-started", [0, 0, 0])


def test_one_warning_names_all_that_other_tools_have_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ours = _save(tmp_path / "step-1", 1)
    for name in ("a.pt", "b.pt"):
        torch.save({"model": WEIGHTS, "optimizer": OPTIMIZER}, tmp_path / name)
        _at(tmp_path / name, 2**33)
    assert dcp.resolve_resume("auto", tmp_path) == ours
    (said,) = (record.getMessage() for record in caplog.records if "passing over" in record.getMessage())
    assert "a.pt" in said and "b.pt" in said


STOCK_READS_IT = "Nothing is damaged. Stock's torch.distributed.checkpoint.load reads the checkpoint."


@pytest.mark.parametrize(("version", "way"), [(9, f"{STOCK_READS_IT} Upgrade: pip install"), (1, STOCK_READS_IT)])
@pytest.mark.parametrize("file", ["dcp_plugin.json", "dcp_plugin.index"])
def test_no_resume_goes_back_behind_a_checkpoint_of_another_version(
    tmp_path: Path, file: str, version: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = _save(tmp_path / "step-1", 1)
    with monkeypatch.context() as patched:
        used = version if file == "dcp_plugin.index" else index_file.INDEX_VERSION
        patched.setattr(index_file, "INDEX_VERSION", used)
        newer = _save(tmp_path / "step-2", 2)
    if file == "dcp_plugin.json":
        change_summary(newer, format_version=version, versions={"dcp_plugin": "4.2"})
    for look in (
        lambda: dcp.resolve_resume("auto", tmp_path),
        lambda: dcp.resume_or_init({"n": 0}, tmp_path, resume="must"),
        lambda: dcp.latest(tmp_path),
        lambda: dcp.load({"n": 0}, newer),
    ):
        with pytest.raises(dcp.CheckpointUnreadable, match=rf"{newer}/{file} is of format version {version}.*{way}"):
            look()
    (run,) = dcp.tools.list_runs(tmp_path)
    assert [(one.path, one.state) for one in run.checkpoints] == [(older, "whole"), (newer, "other format")]
    assert run.resumes is None
    assert dcp.prune(tmp_path, keep_last=1, damaged=True, dry_run=True).checkpoints[1].deleted is False
    assert dcp.resolve_resume(older, tmp_path) == older
    newest = _save(tmp_path / "step-3", 3)
    assert dcp.resolve_resume("auto", tmp_path) == newest


def _without_hash(checkpoint: Path) -> None:
    """As versions 1 and 2 wrote the summary."""
    summary = json.loads((checkpoint / "dcp_plugin.json").read_text())
    del summary["sha256"]
    (checkpoint / "dcp_plugin.json").write_text(json.dumps(summary | {"format_version": 2}))


AGE = {
    "newer": lambda checkpoint: change_summary(checkpoint, format_version=9),
    "older": lambda checkpoint: change_summary(checkpoint, format_version=1),
    "older, without a hash": _without_hash,
}


@pytest.mark.parametrize("age", AGE)
def test_a_checkpoint_of_another_version_is_not_quarantined_deleted_or_replaced(tmp_path: Path, age: str) -> None:
    other = tmp_path / "step-1"
    dcp.save({"w": torch.ones(3)}, other, step=1)
    AGE[age](other)
    before = bytes_in(other)
    with pytest.raises(dcp.CheckpointUnreadable, match=STOCK_READS_IT):
        dcp.resume_or_init({"w": torch.zeros(3)}, tmp_path)
    for replace in (
        lambda: _save(other, 2),
        lambda: stock.save({"n": 2}, storage_writer=dcp.ShardedWriter(other), planner=dcp.ShardedSavePlanner()),
        lambda: dcp.Checkpointer().remove(other),
        lambda: deletion.link(other, tmp_path / "step-2"),
    ):
        with pytest.raises((dcp.CheckpointError, CheckpointException), match=STOCK_READS_IT):
            replace()
    with dcp.Checkpointer(keep_last=1) as ours:
        for step in (2, 3):
            ours.save({"n": step}, tmp_path / f"step-{step}", step=step)
    assert dcp.prune(tmp_path, keep_last=1, damaged=True).checkpoints[0].deleted is False
    assert names_in(tmp_path) == ["step-1", "step-3"]
    assert bytes_in(other) == before
    state = {"w": torch.zeros(3)}
    stock.load(state, checkpoint_id=other)
    assert state["w"].tolist() == [1, 1, 1]


def test_wherever_it_is_a_checkpoint_of_another_version_is_not_replaced(
    place: Where, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(part_writer, "Summary", functools.partial(Summary, format_version=9))
        dcp.save({"n": 1}, place / "step-1", step=1)
    with pytest.raises(dcp.SaveFailed, match=rf"cannot replace {place}/step-1: .*is of format version 9"):
        dcp.save({"n": 2}, place / "step-1", step=2)
    with pytest.raises(dcp.CheckpointError, match=r"is not deleted: .*is of format version 9"):
        dcp.Checkpointer().remove(place / "step-1")


@on_ranks(2)
def test_all_ranks_refuse_a_checkpoint_of_another_version_alike(tmp_path: Path) -> None:
    newer = _save(tmp_path / "step-1", 1)
    if dist.get_rank() == 0:
        change_summary(newer, format_version=9)
    dist.barrier()
    with pytest.raises(dcp.CheckpointUnreadable, match="is of format version 9"):
        dcp.resume_or_init({"n": 0}, tmp_path)


def test_weights_alone_are_no_resume(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    torch.save(WEIGHTS, tmp_path / "pretrained.pt")
    torch.save({"model": WEIGHTS, "epoch": 3}, tmp_path / "best.pth")
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    _folder(tmp_path / "exported", "model.safetensors", "training_args.bin.json")
    assert dcp.resolve_resume("auto", tmp_path) is None
    assert not recwarn.list, "nobody would take them for a run's checkpoints"


def test_what_looks_like_a_resume_and_is_none_is_named(tmp_path: Path) -> None:
    """Each alone, with the reason; and none of them hides an older one that is good. Beside a checkpoint that is
    complete no run starts fresh."""
    torch.save(LIGHTNING_WEIGHTS, tmp_path / "weights.ckpt")
    _folder(tmp_path / "export", "model.safetensors", "trainer_state.json")
    _folder(tmp_path / "no state", "model.safetensors", "optimizer.pt")
    _folder(tmp_path / "no random states", "model.safetensors", "optimizer.bin")
    reasons = {
        "weights.ckpt": "no optimizer to go on with",
        "export": "no optimizer to go on with",
        "no state": "no trainer_state.json",
        "no random states": "no random_states_0.pkl",
    }
    said = _said(tmp_path)
    for name, reason in reasons.items():
        assert re.search(rf"{tmp_path}/{name} \([^)]*{reason}", said), name
    torch.save({"model": WEIGHTS, "optimizer": OPTIMIZER}, tmp_path / "mine.pt")
    cut = _lightning(tmp_path / "cut.ckpt")
    os.truncate(cut, cut.stat().st_size - 100)
    lost = _trainer(tmp_path / "lost")
    os.truncate(lost / "model.safetensors", 50)
    reasons |= {
        "mine.pt": "only a program that knows its form",
        "cut.ckpt": "truncated",
        "lost": "model.safetensors is truncated",
    }
    with pytest.raises(dcp.CheckpointCorrupt, match="none that can be loaded") as refused:
        dcp.resolve_resume("auto", tmp_path)
    for name, reason in reasons.items():
        assert re.search(rf"{tmp_path}/{name} \([^)]*{reason}", str(refused.value)), name
    source = _save(tmp_path.parent / f"{tmp_path.name}-source", 1)
    with pytest.warns(UserWarning, match=r"mine\.pt"):
        assert dcp.resume_or_init({}, tmp_path, init_from=source).how == "warm-started"
    with pytest.raises(dcp.CheckpointNotFound, match=r"Passed over: .*cut\.ckpt"):
        dcp.resolve_resume("must", tmp_path)

    old = _trainer(tmp_path / "export" / "checkpoint-5", time=0)
    assert dcp.latest(tmp_path) == old, "an export beside, or above, the checkpoints of its run"


def test_the_parts_of_an_fsdp_checkpoint_are_no_checkpoints_of_their_own(tmp_path: Path) -> None:
    torn = _folder(tmp_path / "torn", "optimizer.pt")
    for folder in ("pytorch_model_fsdp_0", "optimizer_0"):
        _save(torn / folder, 1)
    assert "torn" in _said(tmp_path)
    _at_text(torn / "trainer_state.json", 1)
    assert dcp.latest(tmp_path) == torn


def test_to_look_for_checkpoints_executes_nothing(tmp_path: Path) -> None:
    hostile = attack(tmp_path / "executed")
    torch.save({**LIGHTNING, "attack": hostile}, tmp_path / "a.ckpt")
    torch.save({"param_groups": hostile}, tmp_path / "b.pt")
    path = _accelerate(tmp_path / "c")
    (path / "random_states_0.pkl").write_bytes(pickle.dumps(hostile))
    for _ in range(2):
        found = dcp.resolve_resume("must", tmp_path)
        assert found is not None
        shutil.rmtree(found) if found.is_dir() else found.unlink()
    with pytest.raises(dcp.CheckpointCorrupt, match=r"b\.pt"):
        dcp.resolve_resume("auto", tmp_path)
    assert not (tmp_path / "executed").exists()


def test_no_retention_touches_what_stock_saved(tmp_path: Path) -> None:
    theirs = [_lightning(tmp_path / "last.ckpt"), _trainer(tmp_path / "checkpoint-1"), _accelerate(tmp_path / "a")]
    for n in range(3):
        _save(tmp_path / f"step-{n}", n, keep_last=1)
    assert all(path.exists() for path in theirs)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-2"]


def test_remove_takes_directories_files_and_links(tmp_path: Path) -> None:
    path = _save(tmp_path / "ck", 1)
    (tmp_path / "last").symlink_to(path)
    ours = dcp.Checkpointer()
    ours.remove(tmp_path / "last")
    assert path.is_dir()
    ours.remove(path)
    ours.remove(path)
    assert not names_in(tmp_path)


def test_a_save_over_a_file_or_a_link_replaces_just_that(tmp_path: Path) -> None:
    path = _save(tmp_path / "ck", 1)
    (tmp_path / "link").symlink_to(path)
    torch.save({"old": 1}, tmp_path / "single.ckpt")
    _save(tmp_path / "link", 2)
    _save(tmp_path / "single.ckpt", 3)
    assert [dcp.inspect(tmp_path / name).step for name in ("ck", "link", "single.ckpt")] == [1, 2, 3]


def test_no_name_in_the_workspace_repeats_the_checkpoints(tmp_path: Path) -> None:
    reservation = commit.reserve(tmp_path / "hpc_ckpt_7.ckpt")
    assert not any("ckpt" in name for name in os.listdir(tmp_path / WORKSPACE))
    assert json.loads(reservation.directory.with_suffix(".json").read_text())["target"] == "hpc_ckpt_7.ckpt"
    commit.discard(reservation)


def test_a_torn_record_is_swept(tmp_path: Path) -> None:
    workspace = tmp_path / WORKSPACE
    (workspace / "0123.saving").mkdir(parents=True)
    (workspace / "0123.json").write_bytes(b'{"targ')
    _save(tmp_path / "ck", 1)
    assert is_tidy(tmp_path)


def test_latest_passes_over_a_checkpoint_whose_copy_was_cut(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = _save(tmp_path / "a", 1)
    file = next(_save(tmp_path / "b", 2).glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])
    assert dcp.latest(tmp_path) == good
    assert "truncated" in caplog.text


def test_what_is_not_there_is_a_file_not_found(tmp_path: Path) -> None:
    for call in (dcp.inspect, lambda path: dcp.load({}, path), lambda path: dcp.resolve_resume(path, tmp_path)):
        with pytest.raises(FileNotFoundError, match="nowhere") as caught:
            call(tmp_path / "nowhere")
        assert isinstance(caught.value, dcp.CheckpointNotFound)


def test_a_url_of_an_unknown_kind_is_refused_and_makes_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for call in (lambda: dcp.save({"n": 1}, "hdfs://host/ck"), lambda: dcp.latest("ftp://host")):
        with pytest.raises(ValueError, match="URL of an unknown kind"):
            call()
    assert not names_in(tmp_path)


def test_a_clock_that_was_set_back_neither_deletes_the_new_nor_prefers_the_old(tmp_path: Path) -> None:
    old = _save(tmp_path / "step-1", 1)
    change_summary(old, time=json.loads((old / "dcp_plugin.json").read_text())["time"] + 3600)
    new = _save(tmp_path / "step-2", 2)
    assert dcp.latest(tmp_path) == new
    newest = _save(tmp_path / "step-3", 3, keep_last=1)
    assert names_in(tmp_path) == ["step-3"]
    assert dcp.latest(tmp_path) == newest


def test_recorded_times_never_run_back_with_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(part_writer, "time", SimpleNamespace(time=lambda: 1.7e9 + now[0]))
    for step, seconds in enumerate([900, 500, 600], start=1):
        now[0] = seconds
        _save(tmp_path / f"step-{step}", step)
        assert dcp.latest(tmp_path) == tmp_path / f"step-{step}"
    by_stock = tmp_path / "stock"
    with pytest.warns(UserWarning, match="single process"):
        stock.save({"n": torch.zeros(1)}, checkpoint_id=str(by_stock))
    os.utime(by_stock / ".metadata", (1.7e9 + 2000,) * 2)
    assert dcp.latest(tmp_path) == by_stock
    now[0] = 700
    _save(tmp_path / "step-4", 4)
    assert dcp.latest(tmp_path) == tmp_path / "step-4"


def test_a_save_reads_the_time_of_each_checkpoint_beside_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    summary_of = published.summary_of
    monkeypatch.setattr(published, "summary_of", lambda files: read.append(files.where) or summary_of(files))
    for step in range(4):
        _save(tmp_path / f"step-{step}", step)
    assert read == [str(tmp_path / f"step-{step}") for step in range(3)]
    shutil.rmtree(tmp_path / "step-1")
    shutil.copytree(tmp_path / "step-0", tmp_path / "step-1")  # another directory gets the name
    _save(tmp_path / "step-4", 4)
    assert sorted(read[3:]) == [str(tmp_path / "step-1"), str(tmp_path / "step-3")]


def test_checkpoints_of_stock_count_by_their_own_time_before_and_between_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [900.0]
    monkeypatch.setattr(part_writer, "time", SimpleNamespace(time=lambda: 1.7e9 + now[0]))
    for step, (before, seconds) in enumerate([(800, 900), (950, 500), (960, 600)], start=1):
        by_stock = tmp_path / f"stock-{step}"
        with pytest.warns(UserWarning, match="single process"):
            stock.save({"n": torch.zeros(1)}, checkpoint_id=str(by_stock))
        os.utime(by_stock / ".metadata", (1.7e9 + before,) * 2)
        assert dcp.latest(tmp_path) == by_stock
        now[0] = seconds  # a clock that was set back after the save of stock
        _save(tmp_path / f"step-{step}", step)
        assert dcp.latest(tmp_path) == tmp_path / f"step-{step}"


def test_an_old_checkpoint_that_is_copied_into_the_run_stays_old(place: Where, tmp_path: Path) -> None:
    for step in (1, 2):
        dcp.save({"n": step}, place / f"step-{step}", step=step)
    dcp.copy(place / "step-1", place / "copy-of-step-1")
    assert dcp.latest(place) == place / "step-2"
    if place == tmp_path:
        shutil.copytree(tmp_path / "step-1", tmp_path / "step-3")
        assert dcp.latest(place) == place / "step-2"


def test_a_flat_state_of_many_keys_has_a_small_summary(tmp_path: Path) -> None:
    dcp.save({f"a.rather.long.name.of.a.parameter.{n}": n for n in range(3000)}, tmp_path / "ck")
    assert (tmp_path / "ck" / "dcp_plugin.json").stat().st_size < 2000
    assert dcp.latest(tmp_path) == tmp_path / "ck"


def test_looking_for_the_latest_does_not_unlock_ones_own_save(tmp_path: Path) -> None:
    reservation = commit.reserve(tmp_path / "mine")
    assert dcp.latest(tmp_path) is None
    assert "mine" in dcp.list_checkpoints(tmp_path)[0].reason
    assert commit.locate(tmp_path / "mine") == tmp_path / "mine"
    launch.run(_save, 1, tmp_path / "other", 1)
    assert reservation.directory.is_dir()
    commit.discard(reservation)


def test_a_file_that_is_no_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(dcp.SaveFailed, match="no checkpoint"):
        _save(tmp_path / "notes.txt", 1)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_link_takes_the_place_of_a_link_and_of_a_checkpoint(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        dcp.save({"x": step}, tmp_path / str(step), step=step)
    for step in (1, 2):
        deletion.link(tmp_path / "last", tmp_path / str(step))
        assert dcp.inspect(tmp_path / "last").step == step
    deletion.link(tmp_path / "3", tmp_path / "1")
    assert dcp.inspect(tmp_path / "3").step == 1
    assert os.readlink(tmp_path / "3") == "1"
    assert names_in(tmp_path) == ["1", "2", "3", "last"]


def test_a_link_takes_the_place_of_nothing_else(tmp_path: Path) -> None:
    dcp.save({"x": 1}, tmp_path / "1", step=1)
    (tmp_path / "last").mkdir()
    (tmp_path / "last/notes.txt").write_text("mine")
    with pytest.raises(dcp.CheckpointError, match=r"last is no checkpoint, and stays as it is: a link to .*1 may not"):
        deletion.link(tmp_path / "last", tmp_path / "1")
    assert (tmp_path / "last/notes.txt").read_text() == "mine"
    (tmp_path / "link").symlink_to("last")
    deletion.link(tmp_path / "link", tmp_path / "1")
    assert os.readlink(tmp_path / "link") == "1"


@pytest.mark.parametrize("before", ["link", "checkpoint"])
def test_a_process_killed_before_it_has_linked_leaves_what_was_there(tmp_path: Path, before: str) -> None:
    for step in (1, 2):
        dcp.save({"x": step}, tmp_path / str(step), step=step)
    if before == "link":
        deletion.link(tmp_path / "last", tmp_path / "1")
    else:
        dcp.save({"x": 1}, tmp_path / "last", step=1)
    launch.run(_link_and_die, 1, tmp_path, killed=[0])
    assert dcp.inspect(tmp_path / "last").step == 1
    dcp.save({"x": 3}, tmp_path / "3", step=3)
    assert is_tidy(tmp_path), "the next save tidies up"


def _link_and_die(root: Path) -> None:
    from dcp_plugin.core.media.disk import posix

    die_at(posix, "exchange")
    die_at(os, "rename")
    deletion.link(root / "last", root / "2")


def test_no_thread_is_left_when_a_save_has_returned(place: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    """Suites of others look for threads that a test has left, as Lightning's own does."""
    monkeypatch.setattr(lease, "_BEAT", 0.0)  # its thread is at work at every moment
    before = set(threading.enumerate())
    medium = medium_of(place)
    for number in range(20):
        medium.discard(medium.reserve(place / f"step-{number}"))
        left = {thread.name for thread in set(threading.enumerate()) - before}
        assert "dcp-heartbeat" not in left
