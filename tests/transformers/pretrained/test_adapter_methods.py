"""Adapters of each method of peft: exports and loads give what peft's own files hold, or an error names a key."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import launch

METHODS = (
    *("lora", "lora, its biases", "lora, all biases", "rslora", "dora", "tokens", "modules_to_save", "ia3", "loha"),
    *("lokr", "oft", "hra", "layer norms", "token embeddings", "vera", "vera, no projections", "prompt", "prefix"),
    *("prefix, projected", "p-tuning", "vblora"),
)
LOADED = ("merged", "from_pretrained")
COMPUTED = {
    ("prefix, projected", "export"): r"prompt_encoder\.default\.transform\.0\.weight.* would be lost",
    ("p-tuning", "export"): r"adapters of P_TUNING \(prompt_encoder\.default\.embedding\.weight",
    ("vblora", "export"): r"adapters of VBLORA \(.*vblora_logits_A\.default",
    **dict.fromkeys([("vera, no projections", how) for how in LOADED], r"PEFT computes .*q_proj\.vera_A\.default"),
    **dict.fromkeys([("oft", how) for how in LOADED], r"PEFT computes .*q_proj\.oft_R\.default\.rows"),
}
"""Values that peft computes from the model, or stores nowhere."""


def _check(root: Path, method: str) -> None:
    from dcp_plugin import CheckpointMismatch
    from tests.transformers.pretrained import adapters

    for how in ("export", *LOADED):
        if (method, how) in COMPUTED:
            with pytest.raises(CheckpointMismatch, match=COMPUTED[method, how]):
                adapters.read(root, how)
        else:
            ours, theirs = adapters.read(root, how)
            assert ours == theirs, how


def _save(root: Path, method: str, way: str) -> None:
    from tests.transformers.pretrained import adapters

    adapters.save(root, method, way)


@pytest.mark.one_of("method")
@pytest.mark.parametrize("way", ["plain", "trainer", "fsdp2"])
@pytest.mark.parametrize("method", METHODS)
def test_adapters_of_each_method_are_those_of_peft(tmp_path: Path, method: str, way: str) -> None:
    if (method, way) == ("vblora", "fsdp2"):
        pytest.skip("FSDP2 does not shard it")
    launch.run(_save, 2 if way == "fsdp2" else 1, tmp_path, method, way)
    launch.run(_check, 1, tmp_path, method)
