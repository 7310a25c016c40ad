"""The README and docs/: their code runs, their options are those of CheckpointConfig, their links lead somewhere."""

from __future__ import annotations

import ast
import doctest
import importlib
import re
import shutil
import subprocess
import sys
import uuid
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

import dcp_plugin as dcp
from dcp_plugin import CheckpointConfig
from tests import programs
from tests.programs import LIGHTNING, TORCH

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").rglob("*.md"))
LINKING = [*sorted(ROOT.glob("*.md")), ROOT / "benchmarks/RESULTS.md", *DOCS]
OF_OTHER_TESTS = ("tutorials",)
PAGES = [ROOT / "README.md", *(page for page in DOCS if page.parent.name not in OF_OTHER_TESTS)]
"""Those whose code is run here."""

MODEL = """
import time, torch, torch.distributed.checkpoint, dcp_plugin as dcp
started = time.time()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4))
optimizer = torch.optim.AdamW(model.parameters())
def train():
    model(torch.ones(1, 4)).sum().backward(), optimizer.step()
"""
PARTS = """
model.backbone = model[0]
dcp.save({"model": torch.nn.Linear(4, 4)}, "pretrained")
"""
TRAINER = """
import functools, lightning
from lightning.pytorch.demos.boring_classes import BoringModel
Trainer = functools.partial(lightning.Trainer, accelerator="cpu", max_epochs=2, limit_val_batches=0,
                            enable_progress_bar=False, enable_model_summary=False, logger=False)
data = torch.utils.data.DataLoader(torch.ones(8, 32))
model = BoringModel()
"""
TRANSFORMERS = """
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
model = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=1,
                                   bos_token_id=0, eos_token_id=0))
data = [{"input_ids": torch.arange(4), "labels": torch.arange(4)}] * 8
args = TrainingArguments("run", use_cpu=True, max_steps=4, save_steps=2, report_to=[], disable_tqdm=True)
"""
SCRIPTS = {  # what is there before: a script that works without us
    "A whole training": "",
    "Lightning: one argument": TRAINER,
    "Accelerate: one line": "from accelerate import Accelerator\naccelerator = Accelerator(cpu=True)\ntrain()",
    "transformers.Trainer: one mixin": TRANSFORMERS,
    "Plain PyTorch: one call": "train()",
    "Fabric: one line": "from lightning.fabric import Fabric\nfabric = Fabric(accelerator='cpu', devices=1)\ntrain()",
    "Without a framework": "train()",
    "A start and a restart": PARTS + "train()",
    "Credentials and options": "",
    "What to write": "state = {'model': model, 'optim': optimizer}\ntrain()",
    "A loop that saves when it is due": "",
    "Trackers": "import os; os.environ.update(WANDB_MODE='offline', WANDB_SILENT='true', WANDB_X_DISABLE_STATS='true')",
    "What a checkpoint costs": PARTS + "state, root = {'model': model[0], 'optim': optimizer}, 'run'",
}
RESTARTED = {  # what holds when the same code runs a second time
    "A whole training": "state['step'] == 300 and dcp.inspect('run/step-300').step == 300",
    "Lightning: one argument": "trainer.ckpt_path is not None and trainer.current_epoch == 2",
    "Accelerate: one line": "checkpoints.last_load is not None",
    "transformers.Trainer: one mixin": "trainer.state.global_step == 4 and dcp.latest('run').stat().st_mtime < started",
    "Plain PyTorch: one call": "dcp.resume_or_init(state, 'run').how == 'resumed'",
    "Fabric: one line": "checkpoints.resume_or_init(state, 'run').how == 'resumed'",
    "Without a framework": "report.loaded == ['model.0.weight', 'model.0.bias']",
    "A start and a restart": "start.how == 'warm-started'",
    "Credentials and options": "'example' not in repr(checkpointer.config)",
    "What to write": "handle.done() and dcp.latest('run').name == 'step-4'",
    "A loop that saves when it is due": "start.how == 'fresh' and step == 100",  # sooner than the first is due
    "Trackers": "handle.done() and run.id and dcp.inspect('run/step-100').step == 100",
    "What a checkpoint costs": "checkpointer.config.trainable_only",
}
CHECKED = "import sys; assert eval(sys.argv[1]), sys.argv[1]"


def _code() -> dict[str, str]:
    """The Python blocks of these pages, those under one heading together."""
    code: dict[str, str] = {}
    for page in PAGES:
        for heading, section in re.findall(r"^##+ (.*)\n((?:(?!^##+ ).*\n)*)", page.read_text(), re.M):
            for block in re.findall(r"^```python\n(.*?)^```", section, re.M | re.S):
                code[heading] = code.get(heading, "") + block
    return code


def test_every_block_of_code_is_run_by_a_test() -> None:
    assert set(_code()) == set(SCRIPTS) == set(RESTARTED)


@pytest.mark.parametrize("heading", SCRIPTS)
def test_the_code_runs_as_it_stands_and_once_more_to_restart(tmp_path: Path, heading: str) -> None:
    code = f"{MODEL}{SCRIPTS[heading]}\n{_code()[heading]}\n"
    # Its folder of the node is one that no other run of the tests has, or has left.
    in_memory = Path(f"/dev/shm/{uuid.uuid4().hex}")
    (tmp_path / "script.py").write_text(code.replace("/dev/shm/my-run", str(in_memory)))
    both = f"import runpy; runpy.run_path('script.py'); globals().update(runpy.run_path('script.py')); {CHECKED}"
    frameworks = LIGHTNING if heading in ("Lightning: one argument", "Fabric: one line") else TORCH
    try:
        ran = programs.run("-c", both, RESTARTED[heading], imported=frameworks, cwd=tmp_path)
    finally:
        shutil.rmtree(in_memory, ignore_errors=True)
    assert ran.returncode == 0, ran.stderr[-3000:]


def _options(page: Path) -> dict[str, object]:
    """Field and default of each row of the table of options."""
    table = page.read_text().split("| field | default | |\n|---|---|---|\n")[1].split("\n\n")[0]
    rows = [re.match(r"\| `(\w+)` \| `([^`]+)` \| \S", line) for line in table.splitlines()]
    assert all(rows)
    return {row[1]: ast.literal_eval(row[2]) for row in rows if row}


def test_docs_options_has_every_field_with_its_default_in_their_order() -> None:
    known = [(field.name, field.default) for field in fields(CheckpointConfig)]
    assert list(_options(ROOT / "docs/reference/options.md").items()) == known


def test_the_readme_is_short() -> None:
    """One screen and a half: everything else has a page."""
    assert len((ROOT / "README.md").read_text().split()) <= 700


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_or_a_heading(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text()):
        path, _, heading = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        if heading:
            found = re.findall(r"^#+ (.*)$", file.read_text(), re.M)
            assert heading in [re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in found], target


WITH_EXAMPLES = [file for file in sorted((ROOT / "dcp_plugin").rglob("*.py")) if ">>> " in file.read_text()]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # which stock says of one process
@pytest.mark.parametrize("file", WITH_EXAMPLES, ids=lambda file: str(file.relative_to(ROOT / "dcp_plugin")))
def test_the_examples_of_docstrings_run(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each docstring in a directory of its own."""
    module = importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
    examples = [test for test in doctest.DocTestFinder().find(module) if test.examples]
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
    for name in dcp.__all__:
        public = getattr(dcp, name)
        made_by_us = isinstance(public, type) and (issubclass(public, Exception) or is_dataclass(public))
        texts = [public, *vars(public).values()] if isinstance(public, type) else [public]
        assert made_by_us or any(">>> " in (one.__doc__ or "") for one in texts), name


def test_events_are_there_after_the_import_of_the_package() -> None:
    script = "import dcp_plugin; print(dcp_plugin.events.subscribe.__name__)"
    made = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert made.stdout == "subscribe\n"
