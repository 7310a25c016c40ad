"""What each way to save and load needs of host memory over the state: docs/concepts/memory.md has the formulas."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import torch

import dcp_plugin as dcp
from tests.launch import on_ranks
from tests.memory import extra_peak

MIB = 1 << 20
STATE = 96 * MIB
SLACK = 16 * MIB
"""For Python, threads and the allocator; what would be a copy of the state is six times as much."""
COPIES = {
    "save": 0,
    "save, past the page cache": 0,
    "async save, blocking": 1,
    "async save, lazy": 1,
    "async save, lazy, once more": 0,
    "load": 0,
    "load, not verifying": 0,
    "verify": 0,
    "export to safetensors": 1,
}
"""Of the state, at most; exporting needs about 128 MiB at the most of larger ones. A later save of a Checkpointer finds
the memory of the one before."""


def _state(value: float) -> dict[str, torch.Tensor]:
    return {f"layers.{number}.weight": torch.full((STATE // 12 // 4,), value) for number in range(12)}


def _in_background(staging: str, state: dict[str, dict[str, torch.Tensor]], path: Path) -> list[int]:
    """Of a first save and of a second one."""
    saver = dcp.Checkpointer(async_save=True, staging=staging, reuse=False)
    found = [extra_peak(lambda path=path / str(number): saver.save(state, path).wait()) for number in range(2)]
    saver.close()
    return found


def _save_directly(state: dict[str, dict[str, torch.Tensor]], path: Path) -> None:
    with suppress(dcp.SaveFailed):  # a file system that refuses
        dcp.save(state, path, io={"direct": True})


@on_ranks(1)
def test_no_way_to_save_or_load_needs_more_than_the_page_on_memory_says(tmp_path: Path) -> None:
    state, target = {"model": _state(1.0)}, {"model": _state(0.0)}
    dcp.save({"model": {"x": torch.ones(1000)}}, tmp_path / "warm-up")
    found = {
        "save": extra_peak(lambda: dcp.save(state, tmp_path / "save")),
        "save, past the page cache": extra_peak(lambda: _save_directly(state, tmp_path / "direct")),
    }
    for staging in ("blocking", "lazy"):
        found[f"async save, {staging}"], once_more = _in_background(staging, state, tmp_path / staging)
    found["async save, lazy, once more"] = once_more
    found |= {
        "load": extra_peak(lambda: dcp.load(target, tmp_path / "save")),
        "load, not verifying": extra_peak(lambda: dcp.load(target, tmp_path / "save", io={"verify": False})),
        "verify": extra_peak(lambda: dcp.verify(tmp_path / "save")),
        "export to safetensors": extra_peak(
            lambda: dcp.export(tmp_path / "save", tmp_path / "model.safetensors", "safetensors")
        ),
    }
    assert set(found) == set(COPIES)
    above = {name: extra // MIB for name, extra in found.items() if extra > COPIES[name] * STATE + SLACK}
    assert not above, f"MiB over a state of {STATE // MIB}"
    assert torch.equal(target["model"]["layers.11.weight"], state["model"]["layers.11.weight"])


def test_the_page_on_memory_has_a_row_for_each_way() -> None:
    page = (Path(__file__).parents[2] / "docs" / "concepts" / "memory.md").read_text()
    rows = set(re.findall(r"^\| ([^|]+?) \|", page, re.MULTILINE))
    assert rows >= set(COPIES)
