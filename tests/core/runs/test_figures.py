"""What saves have cost is noted beside the run, within bounds, and no save depends on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcp_plugin as dcp
from dcp_plugin.core.media import medium_of
from dcp_plugin.core.media.objects.client import client_of
from dcp_plugin.core.paths import Where, as_path
from dcp_plugin.core.runs import figures
from dcp_plugin.errors import SaveFailed
from dcp_plugin.tools.run_report.collect import collect
from tests.faults.proxy import Proxy
from tests.launch import on_ranks
from tests.object_server import Bucket


def test_one_line_for_each_save_and_none_after_a_failure_where_nothing_was(tmp_path: Path) -> None:
    with pytest.raises(SaveFailed):
        dcp.save({"n": 1}, tmp_path / "run" / "a", metrics={"loss": "x"})
    assert not (tmp_path / "run").exists()
    state = {"w": torch.ones(1000), "n": 1}
    dcp.save(state, tmp_path / "run" / "a", step=1, metrics={"loss": float("nan")})
    with pytest.raises(SaveFailed):
        dcp.save(state, tmp_path / "run" / "b", metrics={"loss": "x"})
    saved, failed = figures.read(tmp_path / "run")
    assert (saved["event"], saved["path"], saved["step"], saved["metrics"]) == ("saved", "a", 1, {"loss": "nan"})
    assert saved["bytes"] == saved["ranks"]["bytes"][0] >= 4000 and saved["place"] == "disk"
    assert saved["seconds"] >= saved["blocked_seconds"] >= saved["ranks"]["write_seconds"][0] > 0
    assert failed["event"] == "failed" and "'loss'" in failed["error"] and failed["run"] == saved["run"]


@pytest.mark.usefixtures("forked_keepers")
@pytest.mark.parametrize("place", ["disk", pytest.param("s3", marks=pytest.mark.long)], indirect=True)
@on_ranks(2)
def test_figures_of_all_ranks_by_every_writer(place: Where, tmp_path: Path) -> None:
    settings: list[dict[str, Any]] = [{}, {"async_save": True}, {"async_save": True, "keeper": dcp.Keeper()}]
    for number, config in enumerate([*settings, {"async_save": True, "keeper": {"dir": str(tmp_path / "local")}}]):
        checkpointer, run = dcp.Checkpointer(**config), place / str(number)
        state = {"w": torch.ones(1000), "rank": dist.get_rank()}
        for step in range(2):
            checkpointer.save(state, run / f"step-{step}", step, metrics={"loss": step}).wait()
        checkpointer.close()
        dist.barrier()
        found = figures.read(run)
        assert [(save["step"], save["metrics"]) for save in found] == [(0, {"loss": 0.0}), (1, {"loss": 1.0})], (
            config,
            found,
        )
        assert len({save["run"] for save in found}) == 1
        for save in found:
            ranks = save["ranks"]
            assert set(ranks) == set(figures.COLUMNS) and {len(column) for column in ranks.values()} == {2}
            assert sum(ranks["bytes"]) == save["bytes"] > 4000 and min(ranks["write_seconds"]) > 0
            assert save["seconds"] >= save["blocked_seconds"] > 0
            assert (save["local_seconds"] is not None) == (number == 3)


def test_a_save_to_a_bucket_puts_one_object_of_figures_and_reads_none(bucket: Bucket, proxy: Proxy) -> None:
    run = f"{bucket.url}/run"
    dcp.save({"n": 1}, f"{run}/step-0", step=0, metrics={"loss": 0.0})
    proxy.forget()
    for step in (1, 2, 3):
        dcp.save({"n": step}, f"{run}/step-{step}", step=step, metrics={"loss": step})
    of_figures = [request for request in proxy.requests if ".figures" in request.path]
    assert [request.method for request in of_figures] == ["PUT"] * 3
    dcp.prune(run, keep_last=1)
    assert _figures_in(bucket) == 1, "prune joins them"
    dcp.save({"n": 4}, f"{run}/step-4", step=4, metrics={"loss": 4.0})
    assert _figures_in(bucket) == 2
    for _ in range(2):
        saves = collect(run).saves
        assert [(save.step, save.metrics) for save in saves] == [(step, {"loss": float(step)}) for step in range(5)]
        assert _figures_in(bucket) == 1, "so does a report"


def test_figures_that_an_earlier_version_put_into_one_object_are_read(place: Where) -> None:
    lines = [json.dumps({"event": "saved", "save": f"s{step}", "step": step, "time": 1e9 + step}) for step in (1, 2)]
    medium_of(place).note(place / ".dcp_plugin" / figures.NAME, "\n".join(lines).encode())
    dcp.save({"n": 3}, place / "step-3", step=3)
    assert [save["step"] for save in figures.read(place)] == [1, 2, 3]
    figures.compact(place)
    assert [save["step"] for save in figures.read(place)] == [1, 2, 3]


def _figures_in(bucket: Bucket) -> int:
    path: Any = as_path(f"{bucket.url}/run/.dcp_plugin")
    return sum(one.key.endswith(".figures") for one in client_of(path).below(path.key))


def test_the_file_is_bounded_in_lines_and_in_bytes_and_garbage_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "MOST_SAVES", 5)
    monkeypatch.setattr(figures, "_SLACK", 3)
    file = tmp_path / ".dcp_plugin" / figures.NAME
    file.parent.mkdir()
    file.write_bytes(b'[1]\n{"save": "torn')
    for step in range(20):
        dcp.save({"n": 1}, tmp_path / "a", step=step)
        assert file.read_bytes().count(b"\n") <= 9
    assert [save["step"] for save in figures.read(tmp_path)][-5:] == [15, 16, 17, 18, 19]
    monkeypatch.setattr(figures, "_MOST_BYTES", 3000)
    for step in range(20):
        dcp.save({"n": 1}, tmp_path / "a", step=step)
        assert file.stat().st_size <= 3000
    assert figures.read(tmp_path)[-1]["step"] == 19
    assert figures.newest_lines(b"long\n" * 3, 2) == b"long\n", "the newest is kept whatever its size"


def test_what_cannot_be_noted_fails_no_save(tmp_path: Path) -> None:
    (tmp_path / ".dcp_plugin" / figures.NAME).mkdir(parents=True)
    dcp.save({"n": 1}, tmp_path / "a", step=1)
    assert dcp.inspect(tmp_path / "a").step == 1 and figures.read(tmp_path) == []
    lines = [json.dumps({"save": "x", "step": step}) for step in (1, 2)]
    (tmp_path / "b" / ".dcp_plugin").mkdir(parents=True)
    (tmp_path / "b" / ".dcp_plugin" / figures.NAME).write_text("\n".join(lines))
    assert figures.read(tmp_path / "b") == [{"save": "x", "step": 2}], "the last line about a save counts"
