"""A sample of the damage that ``python -m tests.faults flips`` does to the files of checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import dcp_plugin as dcp
from dcp_plugin.core.format.summary import Summary
from tests.faults.flips import SCENES, damaged, linked

SUMMARY = "dcp_plugin.json"


@pytest.mark.one_of
@pytest.mark.parametrize("scene", SCENES)
def test_damage_to_any_file_is_noticed(scene: str) -> None:
    found = list(damaged(len(scene), 40, scene))
    assert [str(one) for one in found if one.wrong] == []
    assert len(found) == 40


def test_every_bit_of_a_summary_counts(tmp_path: Path) -> None:
    dcp.save({"n": 1, "w": torch.ones(3)}, tmp_path / "ck", step=7)
    good = (tmp_path / "ck" / SUMMARY).read_bytes()
    assert Summary.decode(good, "it").step == 7
    for position in range(8 * len(good)):
        bad = bytearray(good)
        bad[position // 8] ^= 1 << position % 8
        with pytest.raises(dcp.CheckpointCorrupt):
            Summary.decode(bytes(bad), "it")


def test_a_damaged_summary_is_not_taken_for_one_of_an_earlier_version(tmp_path: Path) -> None:
    dcp.save({"n": 1}, tmp_path / "ck", step=7)
    good = (tmp_path / "ck" / SUMMARY).read_bytes()
    bad = good.replace(b'"sha256"', b'"sha257"').replace(b'"format_version": 5', b'"format_version": 2')
    for data in (bad, bad.replace(b'"step": 7', b'"step": 8'), good.replace(b'"format_version": 5', b'"version": 3')):
        with pytest.raises(dcp.CheckpointCorrupt, match="is damaged"):
            Summary.decode(data, "it")


def _change(checkpoint: Path, old: bytes, new: bytes) -> None:
    data = (checkpoint / SUMMARY).read_bytes()
    assert len(old) == len(new) and old in data
    (checkpoint / SUMMARY).write_bytes(data.replace(old, new))


@pytest.mark.parametrize(("name", "digits"), [("1", b"9"), ("2", b"10")], ids=["later", "earlier"])
def test_a_flipped_time_has_no_good_checkpoint_deleted(tmp_path: Path, name: str, digits: bytes) -> None:
    """Of two that are kept, the newest is one, whatever the time of a damaged one seems to be."""
    ours = dcp.Checkpointer(keep_last=2)
    for step in (1, 2):
        ours.save({"n": step}, tmp_path / str(step), step=step)
    time = str(json.loads((tmp_path / name / SUMMARY).read_text())["time"]).encode()
    _change(tmp_path / name, time, digits + time[len(digits) :])
    for step in (3, 4):
        ours.save({"n": step}, tmp_path / str(step), step=step)
    ours.close()
    assert {"3", "4", name} <= {path.name for path in tmp_path.iterdir()}
    assert dcp.latest(tmp_path) == tmp_path / "4"
    for path in (tmp_path / "3", tmp_path / "4"):
        assert dcp.verify(path).ok
    with pytest.raises(dcp.CheckpointCorrupt, match="SHA-256"):
        dcp.verify(tmp_path / name)


def test_latest_says_why_it_passes_over_a_damaged_summary(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (1, 2):
        dcp.save({"n": step}, tmp_path / str(step), step=step)
    _change(tmp_path / "2", b'"step": 2', b'"step": 3')
    assert dcp.latest(tmp_path) == tmp_path / "1" == dcp.resolve_resume("must", tmp_path)
    assert f"passing over {tmp_path / '2'}" in caplog.text and "SHA-256" in caplog.text


def test_a_metadata_with_a_flipped_bit_or_nothing_in_it_is_passed_over(tmp_path: Path) -> None:
    """Stock loads other bytes with some of these flips, and says nothing; ours does not read this file."""
    for step in (1, 2):
        dcp.save({"w": torch.arange(9.0), "n": step}, tmp_path / str(step), step=step)
    file = tmp_path / "2" / ".metadata"
    good = file.read_bytes()
    flipped = [good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :] for at in range(0, len(good), 29)]
    for bad in (b"", *flipped):
        file.write_bytes(bad)
        assert dcp.latest(tmp_path) == tmp_path / "1" == dcp.resolve_resume("auto", tmp_path)
        for look in (dcp.verify, lambda path: dcp.load({"w": torch.zeros(9)}, path)):
            with pytest.raises(dcp.CheckpointCorrupt, match=r"\.metadata is not the one"):
                look(tmp_path / "2")
    file.write_bytes(good)
    assert dcp.latest(tmp_path) == tmp_path / "2" and dcp.verify(tmp_path / "2").ok


def test_of_a_linked_file_the_padding_is_verified_and_the_items_that_no_checkpoint_has_are_not(tmp_path: Path) -> None:
    linked(tmp_path)
    index = dcp.ShardedReader(tmp_path / "4").index
    name, size = max(index.files.items(), key=lambda one: one[1])
    number = index.file_names.index(name)
    used = dict(index.columns["place"][index.places.items_in(number)[1], :2].tolist())
    ends = {begin: begin + -(-length // 64) * 64 for begin, length in used.items()}
    gone = next(end for end in ends.values() if end not in used)
    followed = next(begin for begin, end in ends.items() if end in used)
    file, padding = tmp_path / "4" / name, followed + used[followed]
    assert gone < size and any(other.samefile(file) for other in (tmp_path / "3").iterdir())
    good = file.read_bytes()
    for position, is_noticed in ((gone + 100, False), (padding, True), (followed + 2000, True)):
        file.write_bytes(good[:position] + bytes([good[position] ^ 4]) + good[position + 1 :])
        assert dcp.verify(tmp_path / "4").ok != is_noticed, position


def test_files_beside_are_verified_and_very_large_ones_by_size(tmp_path: Path) -> None:
    def attach(directory: Path) -> None:
        (directory / "deep").mkdir()
        (directory / "deep" / "note.txt").write_text("a note")
        with open(directory / "large", "wb") as file:
            file.truncate(65 << 20)

    ours = dcp.Checkpointer()
    ours.save({"n": 1}, tmp_path / "ck", files=attach)
    ours.close()
    (tmp_path / "ck" / "of the user.txt").write_text("added later")
    report = dcp.verify(tmp_path / "ck")
    assert report.ok and report.unverified == ["large"]
    (tmp_path / "ck" / "deep" / "note.txt").write_text("a nota")
    assert ["deep/note.txt" in said for said in dcp.verify(tmp_path / "ck").errors] == [True]
    (tmp_path / "ck" / "deep" / "note.txt").unlink()
    (tmp_path / "ck" / "large").write_text("")
    assert len(dcp.verify(tmp_path / "ck").errors) == 2
