"""Real runs of W&B (offline) and MLflow (a store of files), and what they were told, read back from their files."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dcp_plugin
from tests.programs import ROOT

GUIDE = ROOT / "docs/guides/trackers.md"


@dataclass(frozen=True)
class Logged:
    """A checkpoint in a run."""

    facts: dict[str, Any]
    references: list[str]
    digest: str
    """Text by which W&B tells versions apart; MLflow has none."""
    aliases: list[str]

    def refers_to(self, uri: str) -> bool:
        """Return whether every reference is to this checkpoint, or to a file in it."""
        return self.facts["uri"] == uri and all(f"{one}/".startswith(f"{uri}/") for one in self.references)


def recipe(**names: Any) -> dict[str, Any]:
    """Return the functions of the guide to trackers. They see ``names`` as global variables."""
    code = ast.parse("".join(re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.M | re.S)))
    code.body = [part for part in code.body if isinstance(part, (ast.Import, ast.FunctionDef))]
    functions = {"dcp": dcp_plugin, **names}
    exec(compile(code, GUIDE, "exec"), functions)
    return functions


class Wandb:
    def __init__(self, root: Path) -> None:
        os.environ.update(WANDB_SILENT="true", WANDB_ERROR_REPORTING="false")
        wandb: Any = importlib.import_module("wandb")
        quick: dict[str, Any] = dict.fromkeys(("x_disable_stats", "x_disable_meta", "disable_git"), True)
        settings = wandb.Settings(console="off", **quick)
        self.run = wandb.init(project="tests", dir=root, mode="offline", settings=settings)
        self.root = root

    def logged(self) -> list[Logged]:
        """Ends the run, and the service of W&B that writes: when ``finish`` returns, it may not have."""
        self.run.finish()
        importlib.import_module("wandb").teardown()
        (log,) = self.root.glob("wandb/offline-run-*/*.wandb")
        return [self._read(record.artifact) for record in self._records(log.read_bytes())]

    def _records(self, log: bytes) -> Iterator[Any]:
        messages: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
        for data in _of_leveldb(log):
            record = messages.Record()
            record.ParseFromString(data)
            if record.HasField("artifact"):
                yield record

    def _read(self, artifact: Any) -> Logged:
        assert artifact.type == "model" and artifact.name == f"model-{self.run.id}"
        entries = artifact.manifest.contents
        assert entries and not any(entry.local_path for entry in entries), "there is something to upload"
        digest = "".join(f"{entry.path} {entry.digest}\n" for entry in entries)  # of these W&B makes a hash
        facts = json.loads(artifact.metadata)
        return Logged(facts, [entry.ref for entry in entries], digest, sorted(artifact.aliases))


def _of_leveldb(log: bytes, header: int = 7, block: int = 1 << 15) -> Iterator[bytes]:
    """The records of a log in LevelDB's format, which begins with as many bytes of W&B's own as a header has."""
    at, record = header, b""
    while at + header <= len(log):
        if block - at % block < header:
            at += block - at % block
            continue
        _, length, kind = struct.unpack_from("<IHB", log, at)
        record += log[at + header : at + header + length]
        at += header + length
        if kind in (1, 4):  # whole, or the last of its parts
            yield record
            record = b""


class Mlflow:
    def __init__(self, root: Path) -> None:
        os.environ.update(MLFLOW_DISABLE_TELEMETRY="true", MLFLOW_ALLOW_FILE_STORE="true")
        mlflow: Any = importlib.import_module("mlflow")
        mlflow.set_tracking_uri(f"file://{root}/mlruns")
        self.run = mlflow.start_run()
        self.client = mlflow.MlflowClient()

    def logged(self) -> list[Logged]:
        """In the order of their names."""
        run_id = self.run.info.run_id
        tags = self.client.get_run(run_id).data.tags
        found = []
        for file in self.client.list_artifacts(run_id, "checkpoints"):
            facts = json.loads(Path(self.client.download_artifacts(run_id, file.path)).read_text())
            tagged = [name for name, uri in tags.items() if uri == facts["uri"]]
            aliases = sorted(name.removeprefix("checkpoint.") for name in tagged if name.startswith("checkpoint."))
            found.append(Logged(facts, [facts["uri"]], "", aliases))
        return found
