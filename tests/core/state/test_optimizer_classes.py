"""Whatever class an optimizer is of, a resumed training ends as with ``torch.save``, in every bit.

``make test`` runs a sample of the classes; ``make test-long`` runs all, also those of packages that are installed by
hand: ``pip install --no-deps timm torchvision torchao bitsandbytes einops``.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import launch
from tests.optimizer_classes import PACKAGES, load_sharded, names_of, run_all, save_sharded

Classes = list[tuple[str, str]]

NAMES = (
    "AdaLOMO",
    "Lookahead",
    "Magma",
    "Ranger21",
    "SAM",
    "ScheduleFreeWrapper",
    "SOAP",
    "StableSPAM",
    "TRAC",
    "WSAM",
)
SAMPLE: Classes = [
    ("torch", "AdamW"),
    *(("pytorch_optimizer", name) for name in NAMES),
    ("schedulefree", "AdamWScheduleFree"),
]


REFUSED_UNDER_FSDP2 = (
    "pytorch_optimizer.Nero", "pytorch_optimizer.SGDSaI",  # partial sums; stock cannot save them either
    "pytorch_optimizer.AdaShift",  # a queue that each rank has for its own part; stock loads it
    "pytorch_optimizer.ScheduleFreeWrapper",  # shards that name no parameter; stock cannot save it either
)  # fmt: skip
"""What a save or a load into a fresh object refuses, with an error that names the key."""


def _is_there(package: str) -> bool:
    return bool(find_spec(package)) and (package != "timm" or bool(find_spec("torchvision")))


def _all() -> Classes:
    return [(package, name) for package in PACKAGES if _is_there(package) for name in names_of(package)]


def _judge(outcomes: dict[str, str], at_least: int) -> None:
    skipped = {name: told for name, told in outcomes.items() if told.startswith("skipped: ")}
    failed = {name: told for name, told in outcomes.items() if told and name not in skipped}
    ran = len(outcomes) - len(skipped)
    print(f"{ran} classes run, {len(skipped)} skipped, {len(failed)} failed")
    print("\n".join(f"{name}: {told}" for name, told in {**skipped, **failed}.items()))
    assert not failed
    assert ran >= at_least, skipped


@pytest.mark.one_of
@pytest.mark.parametrize(("layout", "ranks"), [("plain", 1), ("ddp", 2)])
def test_a_sample_of_classes_resumes_as_with_torch_save(tmp_path: Path, layout: str, ranks: int) -> None:
    _judge(launch.run(run_all, ranks, SAMPLE, layout, tmp_path)[0], at_least=len(SAMPLE))


@pytest.mark.long
@pytest.mark.parametrize(("layout", "ranks"), [("plain", 1), ("ddp", 2)])
def test_every_class_resumes_as_with_torch_save(tmp_path: Path, layout: str, ranks: int) -> None:
    _judge(launch.run(run_all, ranks, _all(), layout, tmp_path)[0], at_least=140)


@pytest.mark.long
def test_every_class_that_runs_under_fsdp2_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    saved = launch.run(run_all, 2, _all(), "fsdp2", tmp_path, save_sharded)[0]
    rest = [case for case in _all() if not saved[".".join(case)]]
    loaded = launch.run(run_all, 3, rest, "fsdp2", tmp_path, load_sharded)[0]
    found = saved | loaded
    for name in REFUSED_UNDER_FSDP2:
        assert found.pop(name, "CheckpointMismatch").startswith("CheckpointMismatch"), name
    _judge(found, at_least=10)
