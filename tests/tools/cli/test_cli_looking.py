"""``dcp-plugin list``, ``inspect``, ``verify``, ``prune``: what they print, as text and as JSON, and how they exit."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from safetensors.torch import save_file
from torch import nn
from typer.testing import Result

import dcp_plugin as dcp
from dcp_plugin.core.paths import Where
from dcp_plugin.tools.contents import statistics
from tests.commands import invoke, json_of
from tests.damage import flip
from tests.foreign import LIGHTNING, LIGHTNING_WEIGHTS
from tests.places import delete_file, stock_writer


def _text(result: Result, *changing: tuple[str, str]) -> list[str]:
    """Lines without what differs from run to run, with two spaces between columns."""
    text = result.stdout
    for pattern, name in changing:
        text = re.sub(pattern, name, text)
    return [re.sub("   +", "  ", line).strip() for line in text.splitlines()]


SIZES = (r"\d+(\.\d)? (B|KiB|MiB)\b", "SIZE")
AGES = (r" \d+ (s|min)\b", " AGE")


def _net() -> nn.ModuleDict:
    layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(3))
    return nn.ModuleDict({"embed": nn.Embedding(8, 4), "layers": layers, "head": nn.Linear(4, 8, bias=False)})


def test_a_list_is_grouped_by_run_and_marks_what_a_resume_loads(place: Where) -> None:
    for step in (1, 2, 3):
        dcp.save({"n": step}, place / "a" / f"step-{step}", step=step, metrics={"loss": 1 / step})
    delete_file(place / "a" / "step-3" / ".metadata")
    there: Any = place / "b" / "ck" if isinstance(place, Path) else str(place / "b" / "ck")  # as users name it to stock
    stock.save({"w": torch.ones(3)}, storage_writer=stock_writer(there))
    lines = _text(invoke("ls", place), SIZES, AGES)
    assert lines[0] == f"{place / 'a'}: 3 checkpoint(s), SIZE"
    assert lines[1] == "checkpoint  step  age  size  own  ranks  layout  state  metrics"
    rows = sorted(line.lstrip("* ") for line in lines[2:5])
    assert rows[:2] == [
        "step-1  1  AGE  SIZE  SIZE  1  whole  loss 1",
        "step-2  2  AGE  SIZE  SIZE  1  whole  loss 0.5",
    ]
    assert rows[2].startswith("step-3") and "  torn" in rows[2]
    assert [line for line in lines if line.startswith("*  step")] == [f"*  {rows[1]}"]
    assert any(
        line.startswith("step-3: it has no .metadata: its save was never committed, or a copy has lost")
        for line in lines
    )
    assert any(line.startswith("*") and line.endswith("foreign: stock DCP") for line in lines)
    assert lines[-1] == "* is what an automatic resume of its run loads."
    runs = json_of("list", place)["runs"]
    assert [(run["folder"], run["resumes"]) for run in runs] == [
        (str(place / "a"), str(place / "a" / "step-2")), (str(place / "b"), str(place / "b" / "ck"))
    ]  # fmt: skip
    assert sorted(one["state"] for one in runs[0]["checkpoints"]) == ["torn", "whole", "whole"]


def test_a_list_shows_a_few_metrics_and_its_document_all(tmp_path: Path) -> None:
    metrics = {f"m{number}": number for number in range(10)}
    dcp.save({"n": 1}, tmp_path / "step-1", step=1, metrics=metrics)
    assert _text(invoke("ls", tmp_path))[2].endswith("whole  m0 0, m1 1, m2 2, and 7 more")
    (run,) = json_of("list", tmp_path)["runs"]
    assert run["checkpoints"][0]["metrics"] == metrics


def test_a_list_shows_the_age_of_a_checkpoint_in_its_largest_unit(tmp_path: Path) -> None:
    for step, age in ((1, 4 * 86_400), (2, 5 * 3600), (3, 120)):
        torch.save(LIGHTNING_WEIGHTS, tmp_path / f"step-{step}.ckpt")
        now = (tmp_path / f"step-{step}.ckpt").stat().st_mtime
        os.utime(tmp_path / f"step-{step}.ckpt", (now - age, now - age))
    rows = [line for line in _text(invoke("ls", tmp_path)) if "foreign" in line]
    assert [re.search(r"\d+ (d|h|min|s)\b", row)[0] for row in rows] == ["4 d", "5 h", "2 min"]  # type: ignore[index]


def test_inspect_folds_layers_that_are_alike(tmp_path: Path) -> None:
    dcp.save({"model": _net(), "epoch": 3}, tmp_path / "ck", step=7)
    lines = _text(invoke("inspect", tmp_path / "ck"))
    assert lines[:-2] == [
        "size  tensors  key",
        "592 B  14  model",
        "128 B  1  embed.weight  8 x 4 float32",
        "336 B  12  layers",
        "336 B  12  0 … 2  3 x 112 B",
        "80 B  2  0",
        "32 B  2  1",
        "128 B  1  head.weight  8 x 4 float32",
        "0 B  0  epoch  1 value(s)",
    ]
    assert lines[-2].startswith(f"{tmp_path / 'ck'}: dcp_plugin checkpoint, step 7")
    assert len(_text(invoke("inspect", tmp_path / "ck", "--depth", 1))) == 5
    assert "model.layers.2.1.bias" in invoke("inspect", tmp_path / "ck", "--all").stdout
    document = json_of("inspect", tmp_path / "ck")["checkpoint"]
    assert (document["step"], len(document["tensors"]), document["values"]) == (7, 14, ["epoch"])


def test_inspect_tells_where_the_bytes_of_a_key_are(place: Where) -> None:
    dcp.save({"model": _net(), "epoch": 3}, place / "ck")
    found = json_of("inspect", place / "ck", "--key", "model.layers.*.0.weight", "--key", "epoch")["chunks"]
    assert [(one["key"], one["sizes"]) for one in found] == [
        *((f"model.layers.{number}.0.weight", [4, 4]) for number in range(3)), ("epoch", [])
    ]  # fmt: skip
    assert all(re.fullmatch("[0-9a-f]{16}", one["xxh3"]) and one["length"] > 64 for one in found)
    lines = _text(invoke("inspect", place / "ck", "--key", "model.head.weight"))
    assert lines[0] == "key  box  file  offset  bytes  xxh3"
    assert lines[1].startswith("model.head.weight  [0:8, 0:4]  __0_0")
    assert json_of("inspect", place / "ck", "--key", "nothing*", status=3)["error"]["type"] == "CheckpointMismatch"


KINDS = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"),
    *("float8_e5m2fnuz", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "complex64"),
)


def test_statistics_of_every_dtype(place: Where) -> None:
    numbers = torch.tensor([0.0, 1.0, 4.0, 3.0])
    state = {kind: numbers.to(getattr(torch, kind)) for kind in KINDS}
    state["bool"] = torch.tensor([True, False, True, True])
    state["broken"] = torch.tensor([1.0, float("nan"), float("inf"), -float("inf"), -3.0, float("nan")])
    state["nothing"] = torch.zeros(0, 3)
    dcp.save(state, place / "ck")
    found = {one.key: one for one in statistics(place / "ck")}
    for kind in KINDS:
        one = found[kind]
        assert (one.low, one.high, one.mean, one.nans, one.infs) == (0, 4, 2, 0, 0), kind
        assert one.norm == pytest.approx(26**0.5)
    assert (found["bool"].low, found["bool"].high, found["bool"].mean) == (0, 1, 0.75)
    broken = found["broken"]
    assert (broken.low, broken.high, broken.mean, broken.norm, broken.nans, broken.infs) == (-3, 1, -1, 10**0.5, 2, 2)
    assert (found["nothing"].low, found["nothing"].mean, found["nothing"].nans) == (None, None, 0)
    printed = _text(invoke("inspect", place / "ck", "--stats", "--include", "broken"))
    assert printed == [
        "key  shape  dtype  min  max  mean  norm  NaN  Inf",
        "broken  6  float32  -3  1  -1  3.162  2  2",
        f"{place / 'ck'}: 1 tensors, 1 of them with NaN or Inf",
    ]
    assert json_of("inspect", place / "ck", "--stats")["stats"][0]["key"] == "float64"


def test_inspect_and_verify_what_others_saved(tmp_path: Path) -> None:
    weights = {"layers.0.w": torch.ones(4), "layers.1.w": torch.ones(4)}
    stock.save(weights, checkpoint_id=tmp_path / "stock")
    save_file(weights, tmp_path / "x.safetensors")
    torch.save(LIGHTNING, tmp_path / "x.ckpt")
    for name in ("stock", "x.safetensors", "x.ckpt"):
        assert invoke("inspect", tmp_path / name).exit_code == 0
        assert json_of("inspect", tmp_path / name)["checkpoint"]["tensors"]
        assert all(one["high"] is not None for one in json_of("inspect", tmp_path / name, "--stats")["stats"])
        (said,) = json_of("verify", tmp_path / name)["checkpoints"]
        assert said["ok"] and said["unverified"]
        assert "have no checksum: they can be read" in invoke("verify", tmp_path / name).stdout


STEERING = "\x1b[2J\x7f\x9b31m\u202etxt\u2066"
ESCAPED = r"\u001b[2J\u007f\u009b31m\u202etxt\u2066"


def test_no_command_prints_a_control_character_of_a_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, out = tmp_path / f"run{STEERING}", tmp_path / "out"
    for number in (1, 2):
        state = {f"w{STEERING}": torch.full((3,), 1.0 * number), f"text{STEERING}": STEERING}
        dcp.save(state, run / f"step-{number}", step=number, metrics={f"m{STEERING}": 1.0})
    first, second = run / "step-1", run / "step-2"
    torch.save({"model": {f"w{STEERING}": torch.ones(2)}}, tmp_path / "file")
    commands: list[tuple[Any, ...]] = [
        ("list", run), ("inspect", first), ("inspect", first, "--all"), ("inspect", first, "--stats"),
        ("inspect", first, "--key", "*"), ("verify", first, run), ("read", first), ("diff", first, second),
        ("export", first, out / STEERING, "--format", "torch"), ("import", tmp_path / "file", out / "ck"),
        ("copy", run, out / f"c{STEERING}"), ("prune", run, "--keep-last", "1", "--dry-run"),
        ("report", run, "--out", out / f"{STEERING}.html"), ("load-plan", first, "--into", str(second)),
        ("read", first, STEERING), ("inspect", tmp_path / STEERING),
    ]  # fmt: skip
    flip(second, f"w{STEERING}")
    commands.append(("verify", second))
    for command in commands:
        for more in ((), ("--json",)):
            result = invoke(*command, *more)
            assert result.exit_code in (0, 1, 3), (command, result.output)
            assert not set("\x1b\x7f\x9b\u202e\u2066") & set(result.output), (command, result.output)
    dcp.latest(run)
    assert json_of("inspect", first)["checkpoint"]["tensors"][0]["key"] == f"w{STEERING}"
    with pytest.raises(dcp.CheckpointMismatch, match=re.escape(ESCAPED)):
        dcp.load({STEERING: torch.ones(1)}, first)
    (second / ".metadata").write_bytes(b"")
    assert dcp.latest(run) == first
    assert ESCAPED in caplog.text and STEERING not in caplog.text


FORGED = "\nforged\tforged"


def test_a_newline_in_a_name_adds_no_line_to_an_output_or_an_error(tmp_path: Path) -> None:
    first, second = tmp_path / "run" / "step-1", tmp_path / "run" / "step-2"
    for number, path in ((1, first), (2, second)):
        dcp.save({f"w{FORGED}": torch.full((2,), 1.0 * number), f"text{FORGED}": FORGED}, path, step=number)
    commands: list[tuple[Any, ...]] = [
        ("inspect", first), ("inspect", first, "--all", "--values"), ("inspect", first, "--stats"), ("read", first),
        ("read", first, "--full"), ("inspect", first, "--key", "*"), ("diff", first, second), ("read", first, FORGED),
        ("inspect", tmp_path / FORGED), ("export", first, tmp_path / "out", "--format", "torch"),
        ("load-plan", first, "--into", str(second)),
    ]  # fmt: skip
    flip(second, f"w{FORGED}")
    commands.append(("verify", second))
    for command in commands:
        output = invoke(*command).output
        assert not any(line.strip().startswith("forged") for line in output.splitlines()), (command, output)
    with pytest.raises(dcp.CheckpointMismatch) as raised:
        dcp.load({f"w{FORGED}": torch.ones(3), f"x{FORGED}": torch.ones(1), "y\n  forged": torch.ones(1)}, first)
    assert not any(line.strip().startswith("forged") for line in str(raised.value).splitlines()), raised.value


def test_a_sparse_table_of_contents_is_damage_that_no_command_reads(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        dcp.save({"w": torch.ones(3)}, tmp_path / f"step-{number}", step=number)
    os.truncate(tmp_path / "step-2" / ".metadata", 1 << 40)
    os.truncate(tmp_path / "step-3" / "dcp_plugin.index", 1 << 40)
    (run,) = dcp.tools.list_runs(tmp_path)
    assert [one.state for one in run.checkpoints][:2] == ["whole", "damaged"]
    assert not dcp.prune(tmp_path, keep_last=3, dry_run=True).deleted
    assert dcp.latest(tmp_path) == tmp_path / "step-1"
    for number in (2, 3):
        with pytest.raises(dcp.CheckpointCorrupt, match="1099511627776 bytes"):
            dcp.load({"w": torch.ones(3)}, tmp_path / f"step-{number}")


@pytest.mark.parametrize("command", [("list",), ("prune", "--keep-last", "1")])
def test_a_place_where_nothing_is_has_an_error_as_json(tmp_path: Path, command: tuple[str, ...]) -> None:
    result = invoke(*command, tmp_path / "nope", "--json")
    assert result.exit_code == 3 and "nothing is there" in result.stderr
    assert json.loads(result.stdout)["error"]["type"] == "FileNotFoundError"


def test_a_report_that_cannot_be_written_names_the_page(tmp_path: Path) -> None:
    dcp.save({"n": 1}, tmp_path / "step-1", step=1)
    result = invoke("report", tmp_path, "--out", tmp_path / "nope" / "x.html")
    assert result.exit_code == 3 and f"'{tmp_path}/nope/x.html'" in result.stderr


@pytest.fixture
def run_with_exported_model(tmp_path: Path) -> Path:
    """Two checkpoints, the first one damaged, and the file that a finished training leaves beside them."""
    run = tmp_path / "run"
    for step in (1, 2):
        dcp.save({"model": torch.nn.Linear(2, 3)}, run / f"checkpoint-{step}", step=step)
    save_file({"weight": torch.zeros(3, 2), "bias": torch.zeros(3)}, run / "model.safetensors")
    flip(run / "checkpoint-1", "model.weight")
    return run


def test_verify_of_a_run_verifies_every_checkpoint_in_it(run_with_exported_model: Path) -> None:
    run = run_with_exported_model
    report = dcp.verify(run)
    assert not report.ok and report.path == run and all("checkpoint-1" in line for line in report.errors)
    assert report.items == 6 and sorted(report.unverified) == ["model.bias", "model.weight"]
    result = invoke("verify", run)
    assert result.exit_code == 1 and f"{run}: DAMAGED" in result.output
    shutil.rmtree(run / "checkpoint-1")
    (run / "model.safetensors").unlink()
    assert dcp.verify(run).items == 2 and invoke("verify", run).exit_code == 0
    (run / "checkpoint-2" / ".metadata").unlink()
    assert "checkpoint-2" in dcp.verify(run).errors[0]


def test_a_run_with_weights_beside_names_what_could_be_meant(run_with_exported_model: Path, tmp_path: Path) -> None:
    run = run_with_exported_model
    model = {"model": torch.nn.Linear(2, 3)}
    uses: list[Callable[[Path], object]] = [
        dcp.inspect,
        dcp.read,
        lambda path: dcp.load(model, path),
        lambda path: dcp.export(path, tmp_path / "out.safetensors", "safetensors"),
        lambda path: dcp.copy(path, tmp_path / "copy"),
        lambda path: dcp.diff(path, path),
    ]
    for use in uses:
        with pytest.raises(dcp.CheckpointNotFound, match=r"model\.safetensors in it, and .*checkpoint-2"):
            use(run)
        use(run / "model.safetensors")
    (run / "model.safetensors").unlink()
    torch.save({"weight": torch.zeros(3, 2), "bias": torch.zeros(3)}, run / "model.pt")
    with pytest.raises(dcp.CheckpointNotFound, match=r"model\.pt in it, and .*checkpoint-2"):
        dcp.load(model, run)
    dcp.load(model, run / "model.pt")


def test_sharded_weights_beside_checkpoints_are_named_by_their_index(tmp_path: Path) -> None:
    run = tmp_path / "run"
    dcp.save({"w": torch.zeros(1)}, run / "version_0" / "checkpoints" / "step-1")
    names = {f"w{n}": f"model-0000{n}-of-00002.safetensors" for n in (1, 2)}
    for key, name in names.items():
        save_file({key: torch.ones(2)}, run / name)
    (run / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(dcp.CheckpointNotFound, match=r"it has model\.safetensors\.index\.json in it, and .*step-1"):
        dcp.read(run)
    assert sorted(dcp.read(run / "model.safetensors.index.json")) == ["model.w1", "model.w2"]
    assert dcp.verify(run).items == 3
    with pytest.raises(dcp.CheckpointMismatch, match=f"copy {run}"):
        dcp.copy(run / "model.safetensors.index.json", tmp_path / "copy")


def test_verify_takes_several_and_tells_the_damaged_from_what_cannot_be_read(tmp_path: Path) -> None:
    for name in ("good", "flipped", "cut"):
        dcp.save({"w": torch.ones(1000)}, tmp_path / name)
    flip(tmp_path / "flipped", "w")
    os.truncate(next((tmp_path / "cut").glob("*.distcp")), 100)
    paths = [tmp_path / name for name in ("good", "flipped", "cut")]
    result = invoke("verify", *paths)
    assert result.exit_code == 1 and "iB/s" in result.stdout
    lines = result.stdout.splitlines()
    assert "intact" in lines[0] and "DAMAGED, 1 item(s)" in lines[1] and "w in __0_0" in lines[2]
    assert f"{paths[2]}: DAMAGED" in lines[3] and "truncated" in lines[3]
    found = json_of("verify", *paths, status=1)["checkpoints"]
    assert [one["ok"] for one in found] == [True, False, False]
    assert found[2]["error"]["type"] == "CheckpointCorrupt"
    result = invoke("verify", paths[0], tmp_path / "nowhere", paths[1])
    assert result.exit_code == 3 and "nowhere: cannot be verified" in result.stderr
    assert "flipped: DAMAGED" in result.stdout, "the others are verified all the same"


def test_prune_shows_then_deletes(place: Where) -> None:
    for step, loss in ((1, 0.5), (2, 0.1), (3, 0.4), (4, 0.3)):
        dcp.save({"n": step}, place / f"step-{step}", step=step, metrics={"loss": loss})
    options = (place, "--keep-last", 1, "--best", "loss")
    shown = _text(invoke("prune", *options, "--dry-run"), SIZES)
    assert shown[:5] == [
        "path  step  size  why",
        f"{place / 'step-1'}  1  SIZE  would go",
        f"{place / 'step-2'}  2  SIZE  kept  best loss: 0.1",
        f"{place / 'step-3'}  3  SIZE  would go",
        f"{place / 'step-4'}  4  SIZE  kept  among the last 1; the newest of its run",
    ]
    assert shown[5].startswith(f"{place}: would delete 2 of 4 checkpoint(s), freeing ")
    assert len(dcp.list_checkpoints(place)) == 4
    document = json_of("prune", *options)
    assert [one["path"] for one in document["checkpoints"] if one["deleted"]] == [
        str(place / "step-1"), str(place / "step-3")
    ]  # fmt: skip
    assert [one.step for one in dcp.list_checkpoints(place)] == [2, 4]


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("prune", "."), 2, "--keep-last, --keep-every, --best METRIC"),
        (("prune", ".", "--keep-last", 0), 2, "--keep-last"),
        (("prune", ".", "--keep-last", 1, "--mode", "lowest"), 2, "it is 'min' or 'max'"),
        (("prune", ".", "--best", "los"), 2, "has a metric 'los'; they have loss"),
        (("prune", "nowhere", "--keep-last", 1), 3, "nothing is there"),
        (("prune", "file", "--keep-last", 1), 3, "is a file"),
        (("list", "nowhere"), 3, "nothing is there"),
        (("inspect", "nowhere"), 3, "nothing is there"),
        (("inspect", "ck", "--key", "x"), 3, "has no key that 'x' matches"),
        (("inspect", "file", "--stats"), 3, "begins like nothing that is known"),
        (("verify",), 2, "Missing argument"),
        (("verify", "file"), 3, "cannot be verified"),
    ],
)
def test_bad_input_is_one_clear_line_and_deletes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[object, ...], status: int, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    dcp.save({"n": 1}, "ck", metrics={"loss": 1.0})
    Path("file").write_text("neither a checkpoint nor anything that is known")
    result = invoke(*arguments)
    assert result.exit_code == status, result.output
    assert said in " ".join(result.stderr.replace("│", " ").split()) and "Traceback" not in result.output
    assert dcp.verify("ck").ok


def test_what_cannot_be_deleted_ends_with_3(tmp_path: Path) -> None:
    for step in (1, 2):
        dcp.save({"n": step}, tmp_path / f"step-{step}", step=step)
    shutil.rmtree(tmp_path / ".dcp_plugin")
    (tmp_path / ".dcp_plugin").write_text("in the way of what is to be deleted")
    result = invoke("prune", tmp_path, "--keep-last", 1)
    assert result.exit_code == 3 and "FAILED" in result.stdout and "1 could not be deleted" in result.stdout
    assert dcp.verify(tmp_path / "step-1").ok


def test_what_is_intact_beside_a_cut_file_is_listed_and_read(tmp_path: Path) -> None:
    path = tmp_path / "on-two-ranks"
    dcp.save({"whole": torch.ones(1, 3), "w": torch.ones(2, 3)}, tmp_path / "ck")
    dcp.export(tmp_path / "ck", path, "dcp", ranks=2)
    (second,) = path.glob("__1_*.distcp")
    os.truncate(second, 10)
    listed = json_of("inspect", path, status=4)["checkpoint"]
    assert list(listed["damaged"]) == ["w"] and "is truncated: 10 of" in listed["damaged"]["w"]
    assert "1 keys are DAMAGED (w)" in invoke("inspect", path).stdout
    read = invoke("read", path)
    assert (read.exit_code, read.stdout) == (4, "whole: float32 1 x 3  [1.0, 1.0, 1.0]\n")
    assert f"{second.name} is truncated" in read.stderr
    assert torch.equal(dcp.read(path, "whole")["whole"], torch.ones(1, 3))
    assert json_of("read", path, "w", status=3)["error"]["type"] == "CheckpointCorrupt"


def test_a_checkpoint_without_one_of_its_tables_says_what_is_still_usable(tmp_path: Path) -> None:
    for name, other in (("dcp_plugin.json", "dcp_plugin.index"), ("dcp_plugin.index", "dcp_plugin.json")):
        dcp.save({"w": torch.ones(4)}, tmp_path / name)
        (tmp_path / name / name).unlink()
        for command in ("inspect", "read"):
            ended = invoke(command, tmp_path / name)
            assert f"{name} is missing. Without {other} as well, it is a checkpoint of stock DCP" in ended.stderr
            assert ended.exit_code == 4 and "w" in ended.stdout
        assert json_of("inspect", tmp_path / name, status=4)["checkpoint"]["tensors"][0]["key"] == "w"
        with pytest.raises(dcp.CheckpointIncomplete):
            dcp.load({"w": torch.zeros(4)}, tmp_path / name)
        assert torch.equal(dcp.read(tmp_path / name)["w"], torch.ones(4))
        (tmp_path / name / other).unlink()
        assert torch.equal(dcp.read(tmp_path / name)["w"], torch.ones(4))


def test_a_run_in_place_of_a_checkpoint_names_the_newest_in_it(tmp_path: Path) -> None:
    for step in (3, 10, 9):
        dcp.save({"n": step}, tmp_path / f"step-{step}")
    assert f"such as {tmp_path}/step-10." in invoke("inspect", tmp_path).stderr
