"""The report of a run: what it collects, that a browser draws it alone, and that nothing gets into it."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as stock

import dcp_plugin as dcp
from dcp_plugin.core.paths import Where
from dcp_plugin.core.runs import figures
from dcp_plugin.errors import CheckpointError, CheckpointNotFound, SaveFailed
from dcp_plugin.tools.cli import terminal
from dcp_plugin.tools.contents import TensorInfo
from dcp_plugin.tools.run_report.charts import charts_of
from dcp_plugin.tools.run_report.collect import _SMALLEST_SHARE, collect, heat_saves, modules_of
from tests.commands import invoke, json_of
from tests.limits import HANG

HOSTILE = "</script><script>document.title='HACKED'</script><img src=x onerror=\"document.title='HACKED'\">%{x}"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def a_run(root: Where, saves: int = 4) -> Where:
    """A run with a frozen part, a failed save and a metric; all in one process."""
    frozen, trained = torch.arange(200_000.0), torch.zeros(1000)
    checkpointer = dcp.Checkpointer(async_save=True)
    for step in range(1, saves + 1):
        state = {"model": {"backbone": {"w": frozen}, "head": {"w": trained + step}}, "step": step}
        checkpointer.save(state, root / f"step-{step}", step, metrics={"val_loss": 1 / step, "lr": math.nan}).wait()
    with pytest.raises(SaveFailed):
        checkpointer.save({"n": 1}, root / "failed", 9, metrics={"val_loss": "x"}).wait()
    checkpointer.close()
    return root


def lines_of(root: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (root / ".dcp_plugin" / figures.NAME).read_text().splitlines()]


def put(root: Path, lines: list[dict[str, object]]) -> None:
    (root / ".dcp_plugin" / figures.NAME).write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_run_on_a_disk_and_in_a_bucket(place: Where) -> None:
    run = collect(a_run(place))
    assert [(save.step, bool(save.error)) for save in run.saves] == [(1, 0), (2, 0), (3, 0), (4, 0), (9, 1)]
    assert (run.newest, run.checkpoints, run.missing) == ("step-4", 4, {})
    assert [save.metrics["val_loss"] for save in run.published] == [1.0, 0.5, 1 / 3, 0.25]
    assert all((save.bytes or 0) > 4000 and (save.seconds or 0) > 0 for save in run.timed)
    assert sum(save.bytes_reused or 0 for save in run.timed) >= (2 * 800_000 if isinstance(place, Path) else 0)
    assert {module.label for module in run.modules} >= {"all", "model", "backbone", "w"}
    assert run.modules[0].nbytes == 804_000 <= (run.newest_bytes or 0)
    assert (run.trainings.count, run.trainings.restarts) == (1, 0) and 0 < (run.trainings.goodput or 0) <= 1


def test_restarts_stragglers_and_what_others_have_written_into_the_figures(tmp_path: Path) -> None:
    a_run(tmp_path)
    saved = lines_of(tmp_path)[0]
    ranks = {name: [1.0, 1.0, 1.0, 5.0] for name in figures.COLUMNS}
    good = [
        {**saved, "step": n, "time": 100.0 + 10 * n + 50 * (n > 3), "save": str(n), "ranks": ranks, "run": str(n > 3)}
        for n in range(1, 7)
    ]
    garbage: list[dict[str, object]] = [
        {**saved, "save": "a", "time": "now"},
        {**saved, "save": "b", "event": "boom"},
        {
            **saved,
            "save": "c",
            "run": 7,
            "time": 105,
            "seconds": -1,
            "bytes": "many",
            "step": "x",
            "ranks": {"bytes": 7},
            "metrics": [1],
        },
        {**saved, "save": "d", "time": 1e300, "path": 5},
        {
            **saved,
            "save": "e",
            "run": "",
            "time": 105.5,
            "ranks": {name: [True] for name in figures.COLUMNS},
            "seconds": 1e999,
        },
    ]
    put(tmp_path, [*good, *garbage])
    for path in tmp_path.glob("step-*"):
        shutil.rmtree(path)
    run = collect(tmp_path)
    assert (run.trainings.restarts, run.checkpoints) == (1, 0) and "modules" in run.missing
    assert run.trainings.lost_seconds == pytest.approx(50, abs=11)
    assert [(one.rank, one.times, one.slowest) for one in run.stragglers] == [(3, 5.0, 6)]
    assert len(heat_saves(run.saves)) == 6
    assert dcp.tools.report(tmp_path, tmp_path / "r.html").read_text().count("Rank 3 is slow") == 1


def test_of_checkpoints_of_another_tool_the_page_says_what_is_missing(tmp_path: Path) -> None:
    stock.save({"model": torch.ones(1000)}, checkpoint_id=tmp_path / "step-1", no_dist=True)
    run = collect(tmp_path)
    assert set(run.missing) == {"metrics", "seconds", "ranks", "reuse", "trainings"}
    text = dcp.tools.report(tmp_path, tmp_path / "report.html").read_text()
    assert text.count('<div class="empty">') == 5 and "saved by another tool" in text
    with pytest.raises(CheckpointNotFound, match="no checkpoint at or below"):
        dcp.tools.report(tmp_path / "nothing", tmp_path / "no.html")
    with pytest.raises(OSError, match="nowhere"):
        dcp.tools.report(tmp_path, tmp_path / "nowhere" / "r.html")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "step-1"]


def test_nothing_of_a_hostile_checkpoint_is_in_the_page_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "step<b>1"
    dcp.save({HOSTILE: torch.ones(1000), "w": torch.ones(9)}, path, 1, metrics={HOSTILE: 1.0, "loss" + HOSTILE: 0.5})
    put(tmp_path, [{**line, "path": HOSTILE, "error": HOSTILE} for line in lines_of(tmp_path) * 2])
    text = dcp.tools.report(tmp_path, tmp_path / "r.html").read_text()
    own = text[: text.index("<script")] + text[text.index('id="charts">') : text.index("</script>")]
    assert "HACKED" in own
    assert "<img" not in own and "<script" not in own and "step<b>" not in own and "<b>1" not in own
    assert "default-src 'none'; script-src 'sha256-" in text and text.count("<script") >= 3
    data = re.search(r'id="charts">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    labels = json.loads(data[1])["modules"]["traces"][0]["labels"]
    assert all("<" not in label for label in labels), "plotly takes some HTML"


def test_modules_are_folded_by_size_and_depth_and_a_hundred_thousand_keys_are_no_matter() -> None:
    tensors = [TensorInfo(f"model.layers.{n % 50}.mlp.{n}.a.b.c.d", (1,), "float32", 1, 4) for n in range(100_000)]
    folded = modules_of(tensors)
    assert len(folded) < 500 and folded[0].nbytes == 400_000
    assert min(module.nbytes for module in folded) >= _SMALLEST_SHARE * 400_000
    ids = [module.id for module in folded]
    assert all(module.parent in ids[: ids.index(module.id)] for module in folded[1:]), "parents come first"
    assert modules_of([]) == []


def test_the_command_writes_a_page_or_says_the_figures(tmp_path: Path) -> None:
    run, out = a_run(tmp_path / "run"), tmp_path / "r.html"
    done = invoke("report", run, "--out", out)
    assert (done.exit_code, done.stdout) == (0, f"{out}: 4 saves of {run}\n") and out.stat().st_size > 1 << 20
    document = json_of("report", run)
    assert document["out"] is None and len(document["report"]["saves"]) == 5
    assert invoke("report", tmp_path / "x").exit_code == terminal.FAILED


def test_without_plotly_it_is_told_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "plotly.offline", None)
    with pytest.raises(CheckpointError, match=r"pip install 'dcp-plugin\[report\]'"):
        dcp.tools.report(a_run(tmp_path), tmp_path / "r.html")


@pytest.mark.long
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
@pytest.mark.parametrize("scheme", ["0", "1"])
def test_a_browser_draws_all_charts_fetches_nothing_and_says_no_error(tmp_path: Path, scheme: str) -> None:
    assert CHROMIUM is not None
    run = a_run(tmp_path / "run")
    dcp.save({HOSTILE: torch.ones(300_000)}, run / "newest", 5, metrics={HOSTILE + "loss": 1.0})
    page, log = dcp.tools.report(run, tmp_path / "r.html"), tmp_path / "net.json"
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--log-net-log={log}"]
    flags += [f"--user-data-dir={tmp_path / 'browser'}", "--disable-background-networking", "--no-first-run"]
    flags += [f"--blink-settings=preferredColorScheme={scheme}", "--virtual-time-budget=5000", "--dump-dom"]
    done = subprocess.run([CHROMIUM, *flags, page.as_uri()], capture_output=True, text=True, timeout=HANG, check=True)
    assert 'data-drawn="5"' in done.stdout and "HACKED</title>" not in done.stdout
    drawn = re.findall(r'<div class="chart[^"]*" id="(\w+)"[^>]*>(?:(?!<section).)*?<svg', done.stdout, re.DOTALL)
    assert drawn == ["metrics", "seconds", "ranks", "reuse", "modules"]
    assert done.stdout.count('class="slice') >= 2, "the treemap has its areas"
    assert "CONSOLE" not in done.stderr, done.stderr
    asked = {url for url in re.findall(r'"url":"(\w+://[^"]*)', log.read_text()) if page.name in url}
    assert not any(url.startswith("http") for url in asked)


def test_the_stages_of_a_save_add_up_to_its_seconds(tmp_path: Path) -> None:
    a_run(tmp_path)
    saved = lines_of(tmp_path)[0]
    ranks = {name: [0.0, 0.0] for name in figures.COLUMNS} | {
        "staging_seconds": [1.0, 0.2],
        "write_seconds": [0.3, 1.2],
    }
    put(tmp_path, [{**saved, "seconds": 1.4, "ranks": ranks}])
    run = collect(tmp_path)
    (save,) = run.timed
    bars = [trace for trace in charts_of(run)["seconds"]["traces"] if trace["type"] == "bar"]
    assert sum(bar["y"][-1] for bar in bars) == pytest.approx(1.4) == save.seconds
