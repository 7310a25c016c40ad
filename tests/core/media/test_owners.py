"""What another user has left over in a shared folder is read, and never changed: not by root either."""

from __future__ import annotations

import ast
import ctypes
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import dcp_plugin as dcp
from dcp_plugin.core.media.disk import commit, posix
from dcp_plugin.core.media.disk.local_disk import LocalDisk
from dcp_plugin.core.media.places import WORKSPACE
from dcp_plugin.tiers import spool
from dcp_plugin.tiers.local_checkpoints import LocalCheckpoints
from tests.users import as_another_user

ATTACKER, VICTIM = 1001, 1002
PACKAGE = Path(dcp.__file__).parent

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture
def sticky(shared: Path) -> Path:
    shared.chmod(0o1777)
    return shared


def _save(path: Path, step: int = 1) -> None:
    dcp.save({"step": step}, path, step=step)


def _plant(root: Path, name: str, record: str, folder: str) -> None:
    """As the attacker: a record of an ended save, and a folder beside it that everybody may write to."""
    workspace = root / name
    workspace.mkdir(exist_ok=True)
    workspace.chmod(0o777)
    (workspace / "aaaa.json").write_text(record)
    (workspace / folder).mkdir()
    (workspace / folder).chmod(0o777)
    (workspace / folder / "rng_state.pth").write_text("pickled")


def _tree(folder: Path) -> dict[str, tuple[int, int, float]]:
    """All entries below a folder, with owner, mode and time of the last change."""
    return {str(path): (s.st_uid, s.st_mode, s.st_mtime) for path in folder.rglob("*") for s in [path.lstat()]}


def _private(root: Path, user: int) -> Path:
    folder = root / "private"
    folder.mkdir(mode=0o700)
    (folder / "secret").write_text("secret")
    os.chown(folder, user, user)
    return folder


HOSTILE = {
    "takes a directory": ({"target": "private"}, "aaaa.aside"),
    "plants files": ({"target": "checkpoint-1", "publishing": "0" * 64}, "aaaa.deleted"),
    "plants files of a save": ({"target": "checkpoint-1", "publishing": "0" * 64}, "aaaa.saving"),
}


@pytest.mark.parametrize("victim", [VICTIM, 0], ids=["another user", "root"])
@pytest.mark.parametrize("workspace", [WORKSPACE, f"{WORKSPACE}-{ATTACKER}"])
@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_save_leaves_alone_what_another_user_has_left_over(
    sticky: Path, victim: int, workspace: str, hostile: str
) -> None:
    record, folder = HOSTILE[hostile]
    private = _private(sticky, victim)
    assert as_another_user(_save, sticky / "checkpoint-1", user=victim) == "None"
    shutil.rmtree(sticky / WORKSPACE)
    assert as_another_user(_plant, sticky, workspace, json.dumps(record), folder, user=ATTACKER) == "None"
    before = _tree(sticky / workspace), private.stat()
    assert as_another_user(_save, sticky / "x", user=victim) == "None"
    assert as_another_user(dcp.prune, sticky, 5, user=victim).startswith(str(sticky))
    assert (_tree(sticky / workspace), private.stat()) == before
    assert os.listdir(private) == ["secret"] and "rng_state.pth" not in os.listdir(sticky / "checkpoint-1")


def test_the_same_with_two_programs_of_two_users(sticky: Path) -> None:
    def run(user: int, code: str) -> str:
        program = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", sys.executable, "-c", code]
        environment = os.environ | {"PYTHONPATH": str(PACKAGE.parent), "PYTHONDONTWRITEBYTECODE": "1"}
        ended = subprocess.run([*program, str(sticky)], capture_output=True, text=True, env=environment, cwd=sticky)
        return ended.stderr

    if shutil.which("setpriv") is None or run(VICTIM, "import dcp_plugin"):
        pytest.skip("other users cannot run this Python")
    _private(sticky, VICTIM)
    plant = """if True:
        import os, sys
        os.umask(0)
        os.makedirs(f"{sys.argv[1]}/.dcp_plugin/aaaa.aside")
        open(f"{sys.argv[1]}/.dcp_plugin/aaaa.json", "w").write('{"target": "private"}')
    """
    assert run(ATTACKER, plant) == ""
    assert run(VICTIM, "import sys, dcp_plugin as dcp; dcp.save({'n': 1}, sys.argv[1] + '/x')") == ""
    assert (sticky / "private").stat().st_uid == VICTIM and (sticky / "private").stat().st_mode & 0o777 == 0o700
    assert (sticky / "x").stat().st_uid == VICTIM and (sticky / f"{WORKSPACE}-{VICTIM}").stat().st_uid == VICTIM


@pytest.mark.parametrize("victim", [VICTIM, 0], ids=["another user", "root"])
def test_a_workspace_that_another_user_has_made_is_not_used(sticky: Path, victim: int) -> None:
    (sticky / WORKSPACE).mkdir()
    os.chown(sticky / WORKSPACE, ATTACKER, ATTACKER)
    (sticky / WORKSPACE).chmod(0o777)
    assert as_another_user(_save, sticky / "x", user=victim) == "None"
    assert os.listdir(sticky / WORKSPACE) == [] and (sticky / f"{WORKSPACE}-{victim}").is_dir()
    shutil.rmtree(sticky / f"{WORKSPACE}-{victim}")
    _plant(sticky, f"{WORKSPACE}-{victim}", "{}", "aaaa.aside")
    os.chown(sticky / f"{WORKSPACE}-{victim}", ATTACKER, ATTACKER)
    told = as_another_user(_save, sticky / "y", user=victim)
    assert "SaveFailed" in told and f"uid {ATTACKER}" in told and "Have it removed, or save to another folder" in told


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
def test_an_own_workspace_loses_the_permissions_of_others_and_their_records_stay(shared: Path, mode: int) -> None:
    (shared / WORKSPACE).mkdir()
    (shared / WORKSPACE).chmod(mode)
    private = _private(shared, 0)
    _plant(shared, WORKSPACE, '{"target": "private"}', "aaaa.aside")
    for path in (shared / WORKSPACE).iterdir():
        os.chown(path, ATTACKER, ATTACKER)
    os.utime(shared / WORKSPACE / "aaaa.json", (0, 0))
    (shared / WORKSPACE).chmod(mode)
    _save(shared / "x")
    assert (shared / WORKSPACE).stat().st_mode & 0o022 == 0 and os.listdir(private) == ["secret"]
    left = [leftover for leftover in LocalDisk().collect_garbage(shared / WORKSPACE) if leftover.stays]
    assert [leftover.path.name for leftover in left] == ["aaaa.aside"] and f"uid {ATTACKER}" in left[0].what


def test_a_umask_of_a_team_makes_no_workspace_that_others_can_write_to(shared: Path) -> None:
    def save() -> None:
        os.umask(0o002)
        _save(shared / "x")

    assert as_another_user(save, user=VICTIM) == "None"
    assert (shared / WORKSPACE).stat().st_mode & 0o777 == 0o755


def test_users_of_a_team_overwrite_and_delete_the_checkpoints_of_each_other(shared: Path) -> None:
    def save(name: str, step: int) -> None:
        os.umask(0o000)
        dcp.save({"step": step}, shared / name, step=step, keep_last=2)

    for number, user in enumerate((ATTACKER, VICTIM, ATTACKER, VICTIM)):
        for name in ("last", f"step-{number}"):
            assert as_another_user(save, name, number, user=user) == "None"
    assert sorted(os.listdir(shared)) == [WORKSPACE, f"{WORKSPACE}-{VICTIM}", "last", "step-3"]
    assert dcp.inspect(shared / "last").step == 3


def test_prune_and_the_list_name_what_another_user_has_left_over(sticky: Path) -> None:
    as_another_user(_plant, sticky, WORKSPACE, '{"target": "x"}', "aaaa.saving", user=ATTACKER)
    (sticky / WORKSPACE / "aaaa.json").touch()
    os.utime(sticky / WORKSPACE / "aaaa.json", (0, 0))
    _save(sticky / "y")
    for dry_run in (True, False):
        (leftover,) = dcp.prune(sticky, keep_last=1, dry_run=dry_run).leftovers
        assert leftover.path.name == "aaaa.saving" and not leftover.deleted
        assert f"an interrupted save of {sticky / 'x'}" in leftover.what and f"uid {ATTACKER}" in leftover.what
    (run,) = dcp.tools.list_runs(sticky)
    assert [f"uid {ATTACKER}" in listed.reason for listed in run.checkpoints if listed.state == "torn"] == [True]


def test_a_checkpoint_that_another_user_moved_aside_is_read_and_not_moved(sticky: Path) -> None:
    as_another_user(_save, sticky / "x", user=VICTIM)
    (sticky / "x").rename(sticky / WORKSPACE / "aaaa.aside")
    (sticky / WORKSPACE / "aaaa.json").write_text('{"target": "x"}')
    os.chown(sticky / WORKSPACE / "aaaa.json", VICTIM, VICTIM)
    _save(sticky / "y", 2)
    assert dcp.inspect(sticky / "x").step == 1 and not (sticky / "x").exists()
    assert as_another_user(_save, sticky / "z", user=VICTIM) == "None"
    assert (sticky / "x").is_dir()


def test_the_own_user_is_the_one_that_new_files_show(shared: Path) -> None:
    """As with root squash: this process is root, and what it makes belongs to another user."""

    def save() -> None:
        ctypes.CDLL(None).setfsuid(VICTIM)
        posix._users.clear()
        for step in (1, 2):
            _save(shared / "x", step)
        assert posix.user_in(shared) == VICTIM and os.geteuid() == 0
        reservation = commit.reserve(shared / "dead")
        os.close(commit._held.pop(reservation.token).descriptor)
        _save(shared / "x", 3)
        assert not reservation.directory.exists(), "it is swept"

    assert as_another_user(save, user=0) == "None"
    assert sorted(os.listdir(shared)) == [WORKSPACE, "x"] and (shared / "x").stat().st_uid == VICTIM


def _become_root_of_a_user_namespace() -> None:
    libc, user = ctypes.CDLL(None, use_errno=True), os.getuid()
    libc.prctl(_PR_SET_DUMPABLE, 1)  # otherwise the files below belong to root
    if libc.unshare(_CLONE_NEWUSER) != 0:
        raise OSError(ctypes.get_errno(), "no user namespaces")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {user} 1")


_PR_SET_DUMPABLE, _CLONE_NEWUSER = 4, 0x10000000


def test_in_a_user_namespace_the_own_user_has_another_number(sticky: Path) -> None:
    """Root of the namespace is another user outside, and the files of all others belong to nobody."""
    as_another_user(_plant, sticky, WORKSPACE, '{"target": "private"}', "aaaa.aside", user=ATTACKER)
    private, before = _private(sticky, VICTIM), _tree(sticky / WORKSPACE)

    def save() -> str:
        _become_root_of_a_user_namespace()
        for step in (1, 2):
            _save(sticky / "y", step)
        return f"{os.geteuid()} {dcp.latest(sticky)}"

    told = as_another_user(save, user=VICTIM)
    if "no user namespaces" in told:
        pytest.skip("no user namespaces")
    assert told == f"0 {sticky / 'y'}"
    assert _tree(sticky / WORKSPACE) == before and os.listdir(private) == ["secret"]
    assert (sticky / f"{WORKSPACE}-0").stat().st_uid == VICTIM


HOSTILE_RECORDS = {
    "deep": b"[" * 60_000,
    "deep object": b'{"target": ' * 500 + b"1" + b"}" * 500,
    "large": b'{"target": "' + b"x" * (1 << 20),
    "number": b'{"target": ' + b"9" * 5000 + b"}",
    "no text": bytes(range(256)),
    "no object": b'["target"]',
}


@pytest.mark.parametrize("owner", [ATTACKER, 0], ids=["another user", "this user"])
@pytest.mark.parametrize("kind", HOSTILE_RECORDS)
def test_a_record_that_cannot_be_read_ends_no_search_and_no_save(
    sticky: Path, kind: str, owner: int, caplog: pytest.LogCaptureFixture
) -> None:
    _save(sticky / "x")
    workspace = sticky / (WORKSPACE if owner == 0 else f"{WORKSPACE}-{owner}")
    _plant(sticky, workspace.name, "", "aaaa.saving")
    (workspace / "aaaa.json").write_bytes(HOSTILE_RECORDS[kind])
    for path in (workspace, *workspace.rglob("*")):
        os.chown(path, owner, owner)
    assert dcp.latest(sticky) == sticky / "x" and dcp.resume_or_init({}, sticky).path == sticky / "x"
    assert [state.path.name for state in dcp.list_checkpoints(sticky) if state.committed] == ["x"]
    _save(sticky / "y", 2)
    dcp.prune(sticky, keep_last=1)
    assert sorted({"aaaa.json", "aaaa.saving"} & set(os.listdir(workspace))) == (
        ["aaaa.json", "aaaa.saving"] if owner else []
    )
    assert caplog.text.count("aaaa.json cannot be read: ") == 1


CHANGES = {"rename", "renames", "replace", "unlink", "remove", "rmdir", "removedirs", "rmtree", "move"}
"""Functions of ``os``, ``shutil`` and ``pathlib`` that rename, move or delete."""
ELSEWHERE = {
    "files that this process has just made": {
        *("tiers/local_checkpoints.py put_file", "tiers/spool.py allocate", "tiers/node.py put"),
        *("tiers/node.py _make_room", "tiers/keeper_writer.py _add_files", "tiers/keeper_writer.py _files_of"),
        *("tiers/journal.py hand_over", "tiers/server.py __init__", "tiers/server.py close"),
        *("core/media/copies.py create", "core/media/disk/local_files.py link_file"),
        *("core/media/disk/local_files.py _reflink",),
    },
    "folders of a save that an OwnFolder has reached": {
        *("tiers/local_checkpoints.py quarantine", "tiers/node.py _write", "tiers/node.py copy"),
        *("tiers/node.py _drain", "core/media/copies.py delete_others"),
    },
    "a new folder of this process, and the memory of keepers that it started": {
        *("tools/prove.py prove", "tools/prove.py put_away", "tools/prove.py _adopting_orphans"),
    },
    "paths that the user has named": {
        *("core/media/disk/commit.py remove", "core/media/disk/commit.py note", "core/media/disk/commit.py write"),
    },
    "the class itself": {f"core/media/disk/posix.py {name}" for name in ("rename", "take", "give", "delete", "remove")},
}
"""Functions that change files without an OwnFolder."""


def _changing(path: Path) -> set[str]:
    """The functions of a module that call one of :data:`CHANGES`, or open a folder without a check of its owner."""
    name, found = path.relative_to(PACKAGE).as_posix(), set()
    for function in ast.walk(ast.parse(path.read_text())):
        for call in ast.walk(function) if isinstance(function, ast.FunctionDef) else ():
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
                of, called = ast.unparse(call.func.value), call.func.attr
                if called in ("NamedFolder", "unlink", "rmdir") or (of in ("os", "shutil") and called in CHANGES):
                    found.add(f"{name} {function.name}")
    return found


def test_all_left_overs_are_changed_through_the_class_that_checks_the_owner() -> None:
    changing = set().union(*map(_changing, PACKAGE.rglob("*.py")))
    assert changing == set().union(*ELSEWHERE.values())
    source = (PACKAGE / "core/media/disk/posix.py").read_text()
    (own,) = (node for node in ast.walk(ast.parse(source)) if getattr(node, "name", "") == "OwnFolder")
    assert "refuse_other_user(" in ast.unparse(own)


def test_the_memory_and_the_local_dir_of_another_user_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool, "_MEMORY", tmp_path)
    local = LocalCheckpoints(tmp_path, tmp_path / "run")
    for folder in (tmp_path / "dcp_plugin-0", local.folder / "token"):
        folder.mkdir(parents=True)
        folder.chmod(0o700)
    for folder in (tmp_path / "dcp_plugin-0", local.folder):
        os.chown(folder, ATTACKER, ATTACKER)
    with pytest.raises(dcp.CheckpointError, match=f"uid {ATTACKER}"):
        spool.base_directory()
    with pytest.raises(PermissionError, match=f"uid {ATTACKER}"):
        local.folder_of("token")
    local.collect_garbage(list)
    assert (local.folder / "token").exists()
