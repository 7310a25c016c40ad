"""What a user's own Trainer saves is in its checkpoints, as with the stock Trainer; and what nobody overrides costs
nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.launch import on_ranks
from tests.transformers.trainer import WORLD_SIZE


def _with_save(base: Any) -> Any:
    class Own(base):  # type: ignore[misc]
        def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
            super()._save(output_dir, state_dict=state_dict)
            os.makedirs(str(output_dir), exist_ok=True)
            shapes = {key: list(value.shape) for key, value in (state_dict or self.model.state_dict()).items()}
            Path(str(output_dir), f"shapes-{self.args.process_index}.json").write_text(json.dumps(shapes))

    return Own


def _with_save_model(base: Any) -> Any:
    class Own(base):  # type: ignore[misc]
        def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
            super().save_model(output_dir, _internal_call)
            os.makedirs(str(output_dir), exist_ok=True)
            Path(str(output_dir), f"mine-{self.args.process_index}.txt").write_text(str(self.state.global_step))

    return Own


def _own_files(path: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in sorted(path.iterdir()) if file.name.startswith(("shapes", "mine"))}


@pytest.mark.one_of("layout")
@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
@on_ranks(of=lambda layout: WORLD_SIZE[layout])
def test_the_files_of_a_trainer_of_ones_own_are_those_that_stock_has(tmp_path: Path, layout: str) -> None:
    """Each way to override a method, on either side of the mixin."""
    import torch.distributed as dist

    from dcp_plugin.transformers import DCPTrainerMixin
    from tests.transformers.trainer import training as t

    behind = [type("Mine", (DCPTrainerMixin, make(t.OnCPU)), {}) for make in (_with_save, _with_save_model)]
    kinds = {
        "nothing": (t.OnCPU, t.Ours),
        "_save behind": (_with_save(t.OnCPU), behind[0]),
        "save_model": (_with_save_model(t.OnCPU), _with_save_model(t.Ours)),
        "save_model behind": (_with_save_model(t.OnCPU), behind[1]),
    }
    for case, both in kinds.items():
        saved = []
        for name, kind in zip(("stock", "ours"), both, strict=True):
            t.trainer(tmp_path / case / name, layout, kind=kind, max_steps=1, save_steps=1).train()
            saved.append(tmp_path / case / name / "checkpoint-1")
        if dist.is_initialized():
            dist.barrier()
        stock, ours = saved
        assert _own_files(ours) == _own_files(stock), case
        weights = [(path / "model.safetensors").exists() for path in saved]
        assert weights == [weights[0]] * 2, case
        assert (ours / "config.json").exists(), case
    called = {case: list(_own_files(tmp_path / case / "stock" / "checkpoint-1")) for case in kinds}
    ranks = [f"mine-{rank}.txt" for rank in range(WORLD_SIZE[layout])]
    assert called["save_model"] == called["save_model behind"] == ranks


@on_ranks(1)
def test_the_trainer_alone_does_not_resume_weights_of_ones_own_without_their_optimizer(tmp_path: Path) -> None:
    from tests.transformers.trainer import training as t

    t.trainer(tmp_path, kind=_with_save_model(t.Ours)).train()
    assert (tmp_path / "checkpoint-6/model.safetensors").exists()
    with pytest.raises(FileNotFoundError, match=r"checkpoint-6/optimizer\.pt"):
        t.trainer(tmp_path, kind=t.OnCPU).train(resume_from_checkpoint=True)


@on_ranks(1)
def test_a_script_can_put_ours_in_the_place_of_the_trainer(tmp_path: Path) -> None:
    import transformers

    from dcp_plugin.transformers import DCPTrainerMixin
    from tests.transformers.trainer import training as t

    class Mine(DCPTrainerMixin, transformers.Trainer):  # type: ignore[misc, name-defined]
        pass

    transformers.Trainer = Mine

    class OfTheScript(transformers.Trainer):  # type: ignore[misc, name-defined]
        layout = "single"

    t.trainer(tmp_path, kind=OfTheScript, max_steps=1, save_steps=1).train()
    assert (tmp_path / "checkpoint-1" / "dcp_plugin.json").exists()
    with pytest.raises(TypeError, match="put DCPTrainerMixin before the Trainer"):
        type("Mine", (t.Trainer, DCPTrainerMixin), {})
