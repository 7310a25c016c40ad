"""torchtitan's own `train.py` with checkpoints that `ShardedWriter` writes and `ShardedReader` reads.

The lines that are added are the class `Manager` and the line that names it in the configuration. When to save, what,
where and what to delete stays with torchtitan. Its data, its tokenizer and its metrics are replaced by small ones, so
that nothing is downloaded.

    pip install "torchtitan==0.3.0" triton
    python examples/with_others/torchtitan_storage.py out          # stop it however you like, and run it again
    python examples/with_others/torchtitan_storage.py out --checkpoint.async-mode=async
"""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.attention.flex_attention

if not torch.cuda.is_available():  # torchtitan supports GPUs alone, and asks these questions about the device
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # flex attention has a backward on a CPU only if it is not compiled
    torch.nn.attention.flex_attention._validate_device = lambda *_: None
    torch._utils._get_available_device_type = lambda: "cpu"
    torch.cpu.get_device_name = lambda device: "CPU"
    torch.cpu.get_device_properties = lambda device: SimpleNamespace(total_memory=1 << 34)
    torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda *_: None
    torch.cpu.memory_stats = lambda device: {}
    dist.barrier = lambda *args, barrier=dist.barrier, **_: barrier()  # gloo takes no device
if not hasattr(dist, "set_timeout"):  # before torch 2.14
    dist.set_timeout = lambda *_: None

from torchtitan import train
from torchtitan.components.checkpoint import MODEL, AsyncMode, CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.llama3 import config_registry, model_registry

from dcp_plugin import ShardedReader, ShardedWriter


class Manager(CheckpointManager):  # added
    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        pass

    def dcp_save(
        self, state_dict: dict[str, Any], checkpoint_id: str, async_mode: AsyncMode, *args: Any, **how: Any
    ) -> Any:
        if how.get("to_hf"):
            return super().dcp_save(state_dict, checkpoint_id, async_mode, *args, **how)
        writer = ShardedWriter(checkpoint_id)
        if async_mode == AsyncMode.DISABLED:
            return dcp.save(state_dict, storage_writer=writer)
        assert async_mode == AsyncMode.ASYNC, "async_with_pinned_mem needs a GPU, and was not tried"
        return dcp.async_save(state_dict, storage_writer=writer, process_group=self.pg)

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        if from_hf:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
        else:
            dcp.load(state_dict, storage_reader=ShardedReader(checkpoint_id))
            self.states[MODEL].load_state_dict(state_dict)


class Letters(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode()

    def get_vocab_size(self) -> int:
        return 256


class Text(torch.utils.data.IterableDataset):
    """The text of `train.py`, again and again; it knows how far it has come."""

    def __init__(self, length: int) -> None:
        self.length, self.read = length, 0
        self.tokens = torch.tensor(list(Path(train.__file__).read_bytes()))

    def __iter__(self) -> Iterator[Any]:
        while True:
            start = 61 * self.read % (len(self.tokens) - self.length - 1)
            self.read += 1
            piece = self.tokens[start : start + self.length + 1]
            yield {"input": piece[:-1], "positions": torch.arange(self.length)}, piece[1:]

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.read = state["read"]


class Loader(ParallelAwareDataloader):
    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        pass

    def __init__(self, config: Config, *, seq_len: int, local_batch_size: int, **options: Any) -> None:
        dp_rank, dp_world_size = options["dp_rank"], options["dp_world_size"]
        super().__init__(Text(seq_len), dp_rank, dp_world_size, batch_size=local_batch_size)


def small() -> Any:
    """Return the configuration that `--module torchtitan_storage --config small` names."""
    config = config_registry.llama3_debugmodel()
    config.model_spec = model_registry("debugmodel", attn_backend="flex")
    config.tokenizer, config.dataloader = Letters.Config(), Loader.Config()
    config.training.local_batch_size, config.training.seq_len = 2, 64
    config.training.disable_cuda_graphs = True
    config.validator.enable, config.debug.seed = False, 1337
    config.checkpoint = Manager.Config(enable=True, interval=2, last_save_model_only=False, keep_latest_k=0)  # added
    return config


if __name__ == "__main__":
    for name, value in {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": 1,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 0,
    }.items():
        os.environ.setdefault(name, str(value))  # as torchrun sets them
    sys.modules["torchtitan_storage"] = sys.modules[__name__]
    sys.argv[1:] = ["--module=torchtitan_storage", "--config=small", f"--dump-folder={sys.argv[1]}", *sys.argv[2:]]
    train.main()
