"""A project or a checkpoint at a URL: nothing of it becomes a local directory, and what has to be local is told."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import dcp_plugin as dcp
from tests.accelerate import ACCELERATE
from tests.compare import assert_same
from tests.launch import on_ranks
from tests.places import names_in


@on_ranks(1)
def test_a_project_in_a_store_leaves_no_local_trace(tmp_path: Path) -> None:
    """``memory://``, which frameworks see too."""
    from dcp_plugin.core.media import medium_of
    from dcp_plugin.core.paths import as_path
    from tests.accelerate import training as t

    os.chdir(tmp_path)
    root = as_path("memory://bucket/run")
    run = t.start("single", project=root, limit=2, async_save=True)
    for number in range(4):
        assert run.train(1).accelerator.save_state() == f"{root}/checkpoints/checkpoint_{number}"
    run.attached.wait()
    medium = medium_of(root)
    names = [one.path.name for one in medium.entries(root / "checkpoints")]
    assert names == ["checkpoint_2", "checkpoint_3"]
    resumed = t.start("single", seed=5, project=root, limit=1)
    start = resumed.attached.resume_or_init()
    assert (start.how, start.path) == ("resumed", f"{root}/checkpoints/checkpoint_3")
    assert_same(resumed.whole_state(), run.whole_state())
    resumed.train(1)
    resumed.accelerator.save_state()
    assert dcp.latest(root) == f"{root}/checkpoints/checkpoint_4"
    other = t.start("single", seed=6)
    other.accelerator.load_state("memory://bucket/run/checkpoints/checkpoint_4")
    other.accelerator.save_state(Path("memory://bucket/by/hand"))
    assert_same(other.whole_state(), resumed.whole_state())
    assert dcp.verify("memory://bucket/by/hand").ok
    assert not list(tmp_path.iterdir())


@on_ranks(1)
def test_hooks_find_their_files_in_a_copy_of_a_bucket_on_a_disk_too(tmp_path: Path) -> None:
    import fsspec

    from tests.accelerate import training as t

    def save(models: Any, weights: Any, folder: str) -> None:
        os.makedirs(f"{folder}/net/deep")
        Path(folder, "net", "deep", "weights.bin").write_bytes(bytes(1000))
        Path(folder, "config.json").write_text("{}")

    found: list[set[str]] = []

    def load(models: Any, folder: str) -> None:
        files = {str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file()}
        assert Path(folder, "net", "deep", "weights.bin").read_bytes() == bytes(1000)
        found.append(files)

    run = t.start("single").train(1)
    run.accelerator.register_save_state_pre_hook(save)
    run.accelerator.register_load_state_pre_hook(load)
    for url in ("memory://bucket/ck", "memory://bucket/ck", str(tmp_path / "ck")):
        if not url.startswith("memory"):
            fsspec.filesystem("memory").get("/bucket/ck/", url, recursive=True)
            Path(url, "notes.txt").touch()
        else:
            run.accelerator.save_state(url)
        other = t.start("single", seed=4)
        other.accelerator.register_load_state_pre_hook(load)
        other.accelerator.load_state(url)
        assert_same(other.whole_state(), run.whole_state())
    written = {"net/deep/weights.bin", "config.json"}
    assert found == [written, written, {*written, "notes.txt"}]


@on_ranks(1)
def test_another_kind_of_url_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    from dcp_plugin.accelerate import attach
    from tests.accelerate import training as t

    os.chdir(tmp_path)
    accelerator = t.start("single").accelerator

    def project(path: str) -> Any:
        settings = ProjectConfiguration(path, automatic_checkpoint_naming=True)
        return attach(Accelerator(cpu=True, project_config=settings))

    for door in (accelerator.save_state, accelerator.load_state, project):
        with pytest.raises(ValueError, match="hdfs://bucket/run is a URL of an unknown kind"):
            door("hdfs://bucket/run")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(ACCELERATE < (1, 15), reason="Accelerate before 1.15 registers no trackers of users")
@on_ranks(1)
def test_files_of_trackers_have_to_be_local(tmp_path: Path) -> None:
    from accelerate import Accelerator
    from accelerate.tracking import GeneralTracker, register_tracker_class
    from accelerate.utils import ProjectConfiguration

    from dcp_plugin.accelerate import attach

    class Notes(GeneralTracker):
        name = "notes"
        requires_logging_directory = True
        tracker = None

        def __init__(self, project: str, directory: str) -> None:
            os.makedirs(directory)  # as TensorBoard's does

    os.chdir(tmp_path)
    register_tracker_class(Notes)
    with pytest.raises(ValueError, match=r"logging_dir of notes .* is a URL\. Give a local one: ProjectConfiguration"):
        attach(Accelerator(cpu=True, log_with="notes", project_dir="s3://bucket/run"))
    attach(Accelerator(cpu=True, project_dir="s3://bucket/run")).detach()
    settings = ProjectConfiguration("s3://bucket/run", logging_dir=str(tmp_path / "logs"))
    accelerator = Accelerator(cpu=True, log_with="notes", project_config=settings)
    attach(accelerator)
    accelerator.init_trackers("run")
    assert names_in(tmp_path) == ["logs"]
