"""How a store is reached, given as ``storage_options``: in any mapping, and in no output, whatever is made of it."""

from __future__ import annotations

import copy
import io
import json
import logging
import os
import pickle
import traceback
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jsonargparse
import pytest
import torch
from omegaconf import OmegaConf

import dcp_plugin as dcp
from dcp_plugin import events
from dcp_plugin.core.media.objects.client import client_of
from dcp_plugin.core.paths import ObjectPath, StoreOptions, as_path
from dcp_plugin.integration.stored import plain
from tests import launch
from tests.finetune import build
from tests.launch import on_ranks
from tests.object_server import Bucket

SECRET = "the-secret-that-nobody-may-see"


def _options(bucket: Bucket) -> dict[str, Any]:
    return {
        "endpoint": bucket.server.url,
        "region": "us-east-1",
        "access_key_id": f"id-{SECRET}",
        "secret_access_key": SECRET,
        "client_options": {"allow_http": True},
    }


def _without_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)


def test_a_save_and_all_that_is_told_of_it_have_no_secret(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _without_settings(monkeypatch)
    url = f"{bucket.url}/run"
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    logging.getLogger().addHandler(handler)
    told: list[Any] = []
    unsubscribe = events.subscribe(told.append)
    config = dcp.CheckpointConfig(
        storage_options=_options(bucket), events=str(tmp_path / "events.jsonl"), keep_last=2, trainable_only=True
    )
    with redirect_stdout(log), redirect_stderr(log), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        checkpointer = dcp.Checkpointer(config)
        for step in (1, 2, 3):
            checkpointer.save({"step": step, "settings": plain(config)}, f"{url}/{step}", step)
        report = checkpointer.load(state := {"step": 0}, f"{url}/3")
        found = dcp.latest(url, storage_options=_options(bucket))
        listed = dcp.list_checkpoints(url, storage_options=_options(bucket))
        nowhere = (f"{url}/9", "s3://none/x")
        errors = [_raised(lambda path=path: checkpointer.load({"step": 0}, path)) for path in nowhere]
        checkpointer.close()
    unsubscribe()
    logging.getLogger().removeHandler(handler)
    assert state == {"step": 3}
    assert found == f"{url}/3" and [one.step for one in listed] == [2, 3]
    said = [repr(one) + str(one) for one in (config, told, report, listed, checkpointer, *warned)]
    stored = _stored(bucket).decode("latin-1")
    assert '"step"' in stored and (tmp_path / "events.jsonl").read_text().count("saved") == 3
    assert all("none" in error or f"{url}/9" in error for error in errors)
    for text in (*said, *errors, stored, log.getvalue(), (tmp_path / "events.jsonl").read_text()):
        assert SECRET not in text


def test_weights_in_a_bucket_are_loaded_at_each_start_with_the_options(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    _without_settings(monkeypatch)
    options, base, run = _options(bucket), f"{bucket.url}/base", f"{bucket.url}/run"
    model, optimizer = build()
    state = {"model": model, "optim": optimizer}
    dcp.save(state, base, storage_options=options)
    for how in ("warm-started", "resumed"):
        ours = dcp.Checkpointer(trainable_only=True, storage_options=options)
        assert dcp.resume_or_init(state, run, init_from=base, checkpointer=ours).how == how
        ours.save(state, f"{run}/step-1")
        assert len(dcp.inspect(f"{run}/step-1", storage_options=options).left_out) == 16


def test_the_configuration_of_an_export_is_read_with_the_options(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _without_settings(monkeypatch)
    options, folder = _options(bucket), f"{bucket.url}/config"
    file = as_path(f"{folder}/config.json", options)
    assert isinstance(file, ObjectPath)
    client_of(file).put(file.key, b"{}")
    dcp.save({"w": torch.zeros(2)}, tmp_path / "run")
    dcp.export(tmp_path / "run", tmp_path / "out", include="w", config=folder, storage_options=options)
    assert (tmp_path / "out" / "config.json").read_bytes() == b"{}"


def _stored(bucket: Bucket) -> bytes:
    path = as_path(bucket.url, _options(bucket))
    assert isinstance(path, ObjectPath)
    client = client_of(path)
    contents = {one.key: memoryview(bytearray(one.size)) for one in client.below("")}
    for key, memory in contents.items():
        client.read(key, 0, [memory], None)
    return b"\n".join(contents.values())


def _raised(call: Any) -> str:
    with pytest.raises(dcp.CheckpointError) as caught:
        call()
    return "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    "options",
    [
        {"secret_acces_key": SECRET},
        {"client_options": {"timeout": SECRET}},
        {"client_options": {SECRET[:4]: 1}, "skip_signature": SECRET},
        {"client_options": SECRET},
        {"retry_config": {"max_retries": SECRET}},
    ],
    ids=lambda options: "+".join(options),
)
def test_options_that_are_refused_are_not_repeated(options: dict[str, Any]) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: dcp.inspect("s3://bucket/x", options),
        lambda: dcp.latest("s3://bucket", options),
        lambda: dcp.save({"n": 1}, "s3://bucket/x", storage_options=options),
        lambda: dcp.load({"n": 1}, "s3://bucket/x", storage_options=options),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="s3://bucket cannot be reached with these options") as caught:
            call()
        assert SECRET not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("given", [SECRET, [SECRET], 3])
def test_what_is_no_mapping_is_refused_by_its_type(given: Any) -> None:
    with pytest.raises(TypeError, match=f"storage_options must be a mapping or None, got a {type(given).__name__}"):
        dcp.CheckpointConfig(storage_options=given)


def test_any_mapping_becomes_plain_containers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Hydra and jsonargparse give it."""
    monkeypatch.setenv("REGION_OF_THE_TEST", "eu-west-1")
    expected = {"region": "eu-west-1", "client_options": {"default_headers": {"x": "1"}, "list": [1, 2]}}
    hydra = OmegaConf.create({"storage_options": {**expected, "region": "${oc.env:REGION_OF_THE_TEST}"}})
    parser = jsonargparse.ArgumentParser()
    parser.add_class_arguments(dcp.CheckpointConfig, "config")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what it deprecates of its own
        typed = parser.parse_args([f"--config.storage_options={json.dumps(expected)}"])
        parsed = parser.instantiate_classes(typed).config
    path = as_path("s3://bucket/x", hydra.storage_options)
    for options in (dcp.CheckpointConfig(**hydra).storage_options, parsed.storage_options, path.options):  # type: ignore[union-attr]
        assert isinstance(options, StoreOptions) and options == expected
        assert type(options["client_options"]) is dict and type(options["client_options"]["list"]) is list


def test_copies_have_them_and_what_is_stored_has_not(tmp_path: Path) -> None:
    options = {"secret_access_key": SECRET}
    config = dcp.CheckpointConfig(storage_options=options)
    assert copy.deepcopy(config) == config == dcp.CheckpointConfig(storage_options=options)
    assert config != dcp.CheckpointConfig(storage_options={"secret_access_key": "another"})
    assert dcp.CheckpointConfig.merge(config, io={"threads": 4}).storage_options == options
    settings = {"config": config, "fields": asdict(config), "path": as_path("s3://bucket/x", options)}
    assert SECRET not in f"{settings!r}{settings}"
    assert SECRET.encode() not in pickle.dumps(settings)
    with pytest.raises(TypeError):
        json.dumps(asdict(config))
    with pytest.raises(dcp.UnsafeCheckpoint, match=r"fields\.storage_options is a StoreOptions") as caught:
        dcp.save(settings, tmp_path / "ck")
    assert SECRET not in str(caught.value)
    dcp.save(plain(settings), tmp_path / "ck")
    assert not any(SECRET.encode() in file.read_bytes() for file in (tmp_path / "ck").iterdir())


def test_a_process_that_is_started_gets_them() -> None:
    options = {"secret_access_key": SECRET}
    assert launch.run(_got, 1, dcp.CheckpointConfig(storage_options=options), options) == [True]


def _got(config: dcp.CheckpointConfig, options: dict[str, Any]) -> bool:
    return config.storage_options == options


@on_ranks(2)
def test_accelerate_comes_to_a_bucket_by_options_alone(bucket: Bucket) -> None:
    from dcp_plugin.accelerate import attach
    from tests.accelerate import training as t

    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    project = as_path(bucket.url) / "project"
    run = t.start("ddp", project=project, limit=1, storage_options=_options(bucket)).train(1)
    paths = [run.accelerator.save_state() for _ in range(2)]
    other = t.start("ddp", seed=4, project=project, storage_options=_options(bucket))
    start = other.attached.resume_or_init()
    assert (start.how, start.path) == ("resumed", paths[1])
    assert other.accelerator.save_state() == f"{project}/checkpoints/checkpoint_2"
    with pytest.raises(ValueError, match="is attached already") as caught:
        attach(other.accelerator, io={"threads": 7})
    assert SECRET not in f"{caught.value}{start}{other.attached.config}"
