"""examples/with_others: each is killed, run again, and ends with what a run has that was never interrupted."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import dcp_plugin
from tests import programs

EXAMPLES = programs.ROOT / "examples/with_others"
OFFLINE = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(programs.ROOT), "TOKENIZERS_PARALLELISM": "false"}
RUN = """
import atexit, itertools, os, runpy, signal, sys, threading
from torch.optim.optimizer import register_optimizer_step_post_hook
{before}
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""
# Of torchtitan, its container of optimizers is an optimizer, too: only torch's own are counted.
COUNTING = RUN.format(
    before="""
steps = itertools.count()
register_optimizer_step_post_hook(lambda optimizer, *_: type(optimizer).__module__.startswith("torch.") and next(steps))
atexit.register(lambda: print(f"made {next(steps)} steps"))
"""
)
KILLED = RUN.format(
    before="""
from dcp_plugin import events
saved, steps = threading.Event(), itertools.count(1)
def note(event):
    if isinstance(event, events.SaveFinished) and event.path.name.endswith("-4"):
        saved.set()
events.subscribe(note)
register_optimizer_step_post_hook(
    lambda optimizer, *_: type(optimizer).__module__.startswith("torch.")
    and next(steps) == 5 and saved.wait() and os.kill(os.getpid(), signal.SIGKILL)
)
"""
)
"""In the fifth step, when the checkpoint of the fourth is complete."""


def run(*arguments: object, cwd: Path) -> tuple[int, str, str]:
    ended = programs.run(*arguments, imported=programs.TRANSFORMERS, cwd=cwd, env={**os.environ, **OFFLINE})
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.parametrize(
    ("package", "script"),
    [
        ("torch", "nanogpt"),
        ("peft", "peft_lora"),
        ("trl", "trl_sft"),
        ("diffusers", "diffusers_text_to_image"),
        ("torchtitan", "torchtitan_storage"),
    ],
)
def test_a_run_that_was_killed_ends_as_if_it_had_not_been(package: str, script: str, tmp_path: Path) -> None:
    pytest.importorskip(package)
    example = EXAMPLES / f"{script}.py"
    code, said, errors = run("-c", COUNTING, example, "straight", cwd=tmp_path)
    assert code == 0, errors
    assert "made 10 steps" in said

    killed = KILLED
    if script == "torchtitan_storage":  # stock dcp.save drives the writer: it waits for the disk, and no event tells
        pytest.importorskip("triton")
        killed = KILLED.replace("saved.wait()", "True")
    code, _, errors = run("-c", killed, example, "stopped", cwd=tmp_path)
    assert code == -signal.SIGKILL, errors
    code, said, errors = run("-c", COUNTING, example, "stopped", cwd=tmp_path)
    assert code == 0, errors
    fills = script == "torchtitan_storage"  # torchtitan makes a step to have a state to load into
    assert f"made {6 + fills} steps" in said

    ends = [dcp_plugin.latest(tmp_path / name) for name in ("straight", "stopped")]
    assert [end and end.name.rpartition("-")[2] for end in ends] == ["10", "10"]
    differ = dcp_plugin.diff(*ends)
    if script == "trl_sft":  # TRL counts the tokens of its log from 0 again in each process, in "num_tokens"
        assert [value.key for value in differ.values] == ["extra.trainer_state"]
        differ.values.clear()
    assert differ.equal
