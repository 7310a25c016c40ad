"""The README and docs/: their code runs, their options are those of CheckpointConfig, their links lead somewhere."""

from __future__ import annotations

import ast
import doctest
import importlib
import re
import shlex
import shutil
import subprocess
import sys
import uuid
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import torch.distributed.checkpoint as stock

import dcp_plugin as dcp
from dcp_plugin import IO, CheckpointConfig, Keeper
from tests import programs
from tests.programs import LIGHTNING, PACKAGE
from tests.project.test_tutorials import BLOCK, SESSIONS, check_commands

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
LINKING = [*sorted(ROOT.glob("*.md")), ROOT / "benchmarks/RESULTS.md", *DOCS]
BY_OTHER_TESTS = [ROOT / "docs/guides/hydra.md", ROOT / "docs/reference/commands.md"]
PAGES = [page for page in (ROOT / "README.md", *DOCS) if page not in BY_OTHER_TESTS]
"""Pages whose sections are run here, each by itself, unless a test runs the page from its beginning to its end."""

MODEL = """
import time, torch, torch.distributed.checkpoint, dcp_plugin as dcp
started = time.time()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4))
optimizer = torch.optim.AdamW(model.parameters())
def train():
    model(torch.ones(1, 4)).sum().backward(), optimizer.step()
"""
LOADER = """
from torchdata.stateful_dataloader import StatefulDataLoader
dataset = torch.ones(40, 4)
loader = StatefulDataLoader(dataset, batch_size=4, shuffle=True)
def train(batch):
    model(batch).sum().backward(), optimizer.step()
"""
PARTS = """
model.backbone = model[0]
dcp.save({"model": torch.nn.Linear(4, 4)}, "pretrained")
"""
TRAINER = """
import functools, lightning
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
Trainer = functools.partial(lightning.Trainer, accelerator="cpu", max_epochs=2, limit_val_batches=0,
                            enable_progress_bar=False, enable_model_summary=False, logger=False)
data = torch.utils.data.DataLoader(torch.ones(8, 32))
class Model(BoringModel):
    def __init__(self, scale=1.0):
        super().__init__()
        self.save_hyperparameters()
model = Model()
"""
TRAINED = (
    TRAINER
    + """
from dcp_plugin.lightning import DCPCheckpointIO
Trainer(plugins=[DCPCheckpointIO()], callbacks=[ModelCheckpoint("run", "{epoch}", save_top_k=-1)]).fit(model, data)
"""
)
ACCELERATOR = """
from accelerate import Accelerator
from dcp_plugin.accelerate import attach
accelerator = Accelerator(cpu=True)
train()
"""
SAVED_BY_ACCELERATE = (
    ACCELERATOR
    + """
checkpoints = attach(accelerator)
model, optimizer = accelerator.prepare(model, optimizer)
accelerator.save_state("run/step-100")
checkpoints.detach()
accelerator = Accelerator(cpu=True)
model, optimizer = torch.nn.Sequential(torch.nn.Linear(4, 4)), None
optimizer = torch.optim.AdamW(model.parameters())
"""
)
TRANSFORMERS = """
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
model = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=1,
                                   bos_token_id=0, eos_token_id=0))
data = [{"input_ids": torch.arange(4), "labels": torch.arange(4)}] * 8
args = TrainingArguments("run", use_cpu=True, max_steps=4, save_steps=2, report_to=[], disable_tqdm=True)
"""
SAVED_BY_TRAINER = (
    TRANSFORMERS
    + """
from dcp_plugin.transformers import DCPTrainerMixin
class OurTrainer(DCPTrainerMixin, Trainer): pass
OurTrainer(model, args, train_dataset=data).train()
"""
)
CONFIG = "from dcp_plugin import CheckpointConfig, Keeper"
BEFORE = {  # a script that works without us, or what an earlier section has made
    "Quickstart": LOADER,
    "Random numbers and data": LOADER,
    "Is the resume exact?": "",
    "Lightning: one argument": TRAINER,
    "Load a model without a Trainer": TRAINED,
    "Back to stock Lightning": TRAINED,
    "Accelerate: one line": ACCELERATOR,
    "Back to stock Accelerate": SAVED_BY_ACCELERATE,
    "transformers.Trainer: one mixin": TRANSFORMERS,
    "Open a checkpoint as a model": SAVED_BY_TRAINER,
    "Back to the stock Trainer": SAVED_BY_TRAINER,
    "Write a folder": SAVED_BY_TRAINER,
    "Use it": SAVED_BY_TRAINER
    + "import os; os.path.exists('served') or dcp.export('run/checkpoint-4', 'served', format='hf')",
    "Plain PyTorch: one call": "train()",
    "Fabric: one line": "from lightning.fabric import Fabric\nfabric = Fabric(accelerator='cpu', devices=1)\ntrain()",
    "Without a framework": "train()",
    "Several modules or optimizers under one name": "model = [torch.nn.Linear(4, 4) for _ in range(3)]",
    "A value for each rank": "train()",
    "A start and a restart": PARTS + "train()",
    "Checkpoints without the frozen part": PARTS + "state, root = {'model': model[0], 'optim': optimizer}, 'run'",
    "Groups": "",
    "One machine": CONFIG,
    "A job that may be ended": CONFIG,
    "Many nodes and a shared disk": CONFIG,
    "No shared disk": CONFIG,
    "A bucket": CONFIG,
    "In the training": "",
    "Restart from memory": "",
    "Save and resume": "state = {'model': model, 'optim': optimizer}",
    "Credentials": "",
    "Settings": "state = {'model': model, 'optim': optimizer}\ntrain()",
    "A loop that saves when it is due": "",
    "Trackers": """
import os
os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true", WANDB_X_DISABLE_STATS="true")
os.environ.update(MLFLOW_DISABLE_TELEMETRY="true", MLFLOW_ALLOW_FILE_STORE="true", MLFLOW_TRACKING_URI="mlruns")
""",
}
AFTER = {  # what holds when the same code has run a second time; True if it has not failed
    "Is the resume exact?": "start.report.exact",
    "Quickstart": "state['step'] == 300 and dcp.inspect('run/step-300').step == 300",
    "Lightning: one argument": "trainer.ckpt_path is not None and trainer.current_epoch == 2",
    "Load a model without a Trainer": "trained.hparams.scale == 2.0",
    "Accelerate: one line": "checkpoints.last_load is not None",
    "Back to stock Accelerate": "__import__('os').path.exists('run/step-100-accelerate/model.safetensors')",
    "transformers.Trainer: one mixin": "trainer.state.global_step == 4 and dcp.latest('run').stat().st_mtime < started",
    "Open a checkpoint as a model": "loaded.dtype == torch.bfloat16",
    "Use it": "model.config.n_embd == 8",
    "Plain PyTorch: one call": "dcp.resume_or_init(state, 'run').how == 'resumed'",
    "Fabric: one line": "checkpoints.resume_or_init(state, 'run').how == 'resumed'",
    "Without a framework": "report.loaded == ['model.0.weight', 'model.0.bias']",
    "A start and a restart": "start.how == 'warm-started'",
    "Checkpoints without the frozen part": "checkpointer.config.trainable_only",
    "Save and resume": "start.how == 'resumed' and isinstance(latest, str)",
    "Credentials": "'example' not in repr(checkpointer.config)",
    "Settings": "handle.done() and dcp.latest('run').name == 'step-4'",
    "A loop that saves when it is due": "start.how == 'fresh' and step == 100",  # sooner than the first is due
    "Trackers": "handle.done() and run.id and dcp.inspect(facts_of('run/step-100')['uri']).step == 100 "
    "and 'checkpoint.best' in mlflow.get_run(started.info.run_id).data.tags",
}
CHECKED = "import sys; assert eval(sys.argv[1]), sys.argv[1]"
LANGUAGES = {"python", "console", "bash", "yaml", "json", "text", "mermaid", "{eval-rst}", "{toctree}"}
SECTION = re.compile(r"^##+ (.*)\n((?:(?!^##+ ).*\n)*)", re.M)


def _sections() -> dict[str, str]:
    """The sections of these pages that have Python or commands, by their heading."""
    sections: dict[str, str] = {}
    for page in PAGES:
        kinds = "python" if page in SESSIONS else "python|console"
        for heading, section in SECTION.findall(page.read_text()):
            if re.search(rf"^```({kinds})$", section, re.M):
                assert heading not in sections, f"two sections are called {heading!r}"
                sections[heading] = section
    return sections


def test_every_block_of_code_is_run_by_a_test() -> None:
    assert set(_sections()) == set(BEFORE) >= set(AFTER)


@pytest.mark.parametrize("page", [ROOT / "README.md", *DOCS], ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_names_its_language(page: Path) -> None:
    fences = re.findall(r"^ *```(.*)$", page.read_text(), re.M)
    assert {fence.partition(" ")[0] for fence in fences[::2]} <= LANGUAGES
    assert set(fences[1::2]) <= {""}


def _imported_by(code: str) -> tuple[str, ...]:
    if "lightning" in code:
        return LIGHTNING
    return programs.TRANSFORMERS if re.search("transformers|accelerate", code) else PACKAGE


@pytest.mark.one_of(count=6)
@pytest.mark.parametrize("heading", BEFORE)
def test_the_code_of_a_section_runs_and_runs_again_to_restart(
    tmp_path: Path, heading: str, request: pytest.FixtureRequest
) -> None:
    section = _sections()[heading]
    if "s3://bucket" in section:
        section = section.replace("s3://bucket", request.getfixturevalue("bucket").url)
    code = "".join(block["text"] for block in BLOCK.finditer(section) if block["kind"] == "python")
    # Its folder of the node is one that no other run of the tests has, or has left.
    in_memory = Path(f"/dev/shm/{uuid.uuid4().hex}")
    for name in ("/dev/shm/my-run", "/dev/shm/run", "/local/nvme/run"):
        code = code.replace(name, str(in_memory))
    (tmp_path / "script.py").write_text(f"{MODEL}{BEFORE[heading]}\n{code}\n")
    both = f"import runpy; runpy.run_path('script.py'); globals().update(runpy.run_path('script.py')); {CHECKED}"
    imported = _imported_by(BEFORE[heading])
    try:
        ran = programs.run("-c", both, AFTER.get(heading, "True"), imported=imported, cwd=tmp_path)
    finally:
        shutil.rmtree(in_memory, ignore_errors=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    for block in BLOCK.finditer(section):
        if block["kind"] == "console":
            check_commands(block["text"], tmp_path, imported)


RUNS = """
import torch, dcp_plugin as dcp
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(40, 8), torch.nn.Linear(8, 4)
        self.layers = torch.nn.ModuleList(torch.nn.ModuleDict({"norm1": torch.nn.LayerNorm(8)}) for _ in range(2))
for run in ("a", "b", "c"):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(100, 600, 100):
        tokens = torch.arange(40) if run != "b" or step < 300 else torch.ones(40).long()
        model.head(model.embed(tokens)).sum().backward()
        optimizer.step()
        state = {"model": model, "optim": optimizer, "epoch": step // 100}
        dcp.save(state, f"runs/{run}/step-{step}", step=step, metrics={"val_loss": 30 / step})
(file, *_) = sorted(__import__("pathlib").Path("runs/c/step-200").glob("*.distcp"))
file.write_bytes(file.read_bytes()[:1000])
"""


@pytest.mark.parametrize("page", [ROOT / "docs/reference/commands.md"], ids=lambda page: page.stem)
def test_every_command_of_the_reference_runs(page: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Their output depends on the machine and is not compared. A status of 1 is an answer: damage, or a difference."""
    programs.run("-c", RUNS, imported=PACKAGE, cwd=tmp_path)
    text = page.read_text().replace("s3://bucket", request.getfixturevalue("bucket").url)
    commands = [
        command
        for block in BLOCK.finditer(text)
        if block["kind"] == "console"
        for command in re.findall(r"^\$ dcp-plugin (.*)$", block["text"], re.M)
    ]
    assert len(commands) > 10
    for command in commands:
        ran = programs.run("-m", "dcp_plugin", *shlex.split(command), imported=PACKAGE, cwd=tmp_path)
        assert ran.returncode in (0, 1) and "Traceback" not in ran.stderr, f"{command}\n{ran.stdout}{ran.stderr}"


def test_docs_options_has_every_field_with_its_default_in_their_order() -> None:
    page = (ROOT / "docs/reference/options.md").read_text()
    tables = [rest.split("\n\n")[0] for rest in page.split("| field | default | |\n|---|---|---|\n")[1:]]
    for table, group in zip(tables, (CheckpointConfig, Keeper, IO), strict=True):
        rows = [re.match(r"\| `(\w+)` \| `([^`]+)` \| \S", line) for line in table.splitlines()]
        assert all(rows)
        found = [(row[1], eval(row[2], {"IO": IO})) for row in rows if row]
        assert found == [(field.name, field.default) for field in fields(group)]


def test_the_readme_is_short() -> None:
    """One screen and a half: everything else has a page."""
    assert len((ROOT / "README.md").read_text().split()) <= 700


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_row_of_a_table_has_as_many_cells_as_its_head(page: Path) -> None:
    """The site drops the cells that are too many."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    for table in re.findall(r"(?:^\|.*\n)+", text, re.M):
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}) == 1, table


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_or_a_heading(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text()):
        path, _, heading = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        if heading:
            found = re.findall(r"^#+ (.*)$", file.read_text(), re.M)
            assert heading in [re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in found], target


FOLDERS = [ROOT, *(ROOT / name for name in ("dcp_plugin", "dcp_plugin/core", "tests", "docs"))]
PROJECT = [ROOT / "CONTRIBUTING.md", ROOT / "docs/glossary.md", *sorted((ROOT / "docs/project").glob("*.md"))]
STOCK = Path(stock.__file__).parent


@pytest.mark.parametrize("page", PROJECT, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_and_folder_named_for_contributors_exists(page: Path) -> None:
    named = re.findall(r"`((?:[\w.]+/)+(?:\w+\.[a-z]+)?)`", page.read_text())
    missing = {path for path in named if not any((folder / path).exists() for folder in FOLDERS)}
    assert missing <= {"dist/"}, "a command makes that folder"


def test_the_invariants_name_tests_that_exist_and_fit_on_a_page() -> None:
    page = (ROOT / "docs/project/invariants.md").read_text()
    assert len(page.split()) <= 500
    for section in page.split("\n## ")[1:]:
        (usual,) = re.findall(r"^The tests are in `(.*?)`", section, re.M)
        rows = re.findall(r"^\| .*\. \| (?:`(.*?)`: )?`(test_\w+)` \|$", section, re.M)
        assert len(rows) == section.count("\n|") - 2
        for file, name in rows:
            assert f"def {name}(" in (ROOT / (file or usual)).read_text(), name


def test_the_glossary_names_classes_of_dcp_and_where_ours_are() -> None:
    code = "".join(file.read_text() for file in STOCK.glob("*.py"))
    table = (ROOT / "docs/glossary.md").read_text().partition("## The words of DCP")[2]
    for _, theirs, ours in re.findall(r"^\| (.*?) \| (.*?) \| (.*?) \|$", table, re.M)[1:]:
        for name in re.findall(r"`(_?[A-Za-z]\w+(?:\.\w+)?)`", theirs):
            assert all(re.search(rf"\b{part}\b", code) for part in name.split(".")), name
        for name, file in re.findall(r"`(\w+)` in `([\w/]+\.py)`", ours):
            assert re.search(rf"^(class )?{name}\b", (ROOT / "dcp_plugin/core" / file).read_text(), re.M), name


_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef)
WITH_EXAMPLES = [file for file in sorted((ROOT / "dcp_plugin").rglob("*.py")) if ">>> " in file.read_text()]


@pytest.mark.parametrize("file", WITH_EXAMPLES, ids=lambda file: str(file.relative_to(ROOT / "dcp_plugin")))
def test_the_examples_of_docstrings_run(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each docstring in a directory of its own."""
    module = importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
    defined = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, _WITH_DOCSTRING)]
    texts = [text for node in defined if ">>> " in (text := ast.get_docstring(node) or "")]
    parse = doctest.DocTestParser().get_doctest
    examples = [parse(text, dict(vars(module)), module.__name__, str(file), 0) for text in texts]
    assert examples
    for number, example in enumerate(examples):
        (tmp_path / str(number)).mkdir()
        monkeypatch.chdir(tmp_path / str(number))
        said: list[str] = []
        assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=said.append).failed == 0, "".join(
            said
        )


def test_every_public_function_and_class_has_an_example() -> None:
    """Errors and what functions return have none: they are never made by a user."""
    names = {name: getattr(module, name) for module in (dcp, dcp.tools) for name in module.__all__}
    for name, public in names.items():
        made_by_us = isinstance(public, type) and (issubclass(public, Exception) or is_dataclass(public))
        texts = [public, *vars(public).values()] if isinstance(public, type) else [public]
        assert made_by_us or any(">>> " in (one.__doc__ or "") for one in texts), name


def test_events_are_there_after_the_import_of_the_package() -> None:
    script = "import dcp_plugin; print(dcp_plugin.events.subscribe.__name__)"
    made = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert made.stdout == "subscribe\n"
