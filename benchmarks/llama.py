"""States of Llamas with AdamW: one of 1B parameters that no cache holds, and the pattern of MLPerf Storage, scaled.

The model is transformers' ``LlamaForCausalLM`` with the configuration of Llama 3.2 1B (1.24 billion parameters), fp32
under FSDP2: 13.8 GiB with both moments, over all ranks. HSDP 2x2 holds everything twice, so it is bf16 there: 13.8 GiB
too. *MLPerf* is the checkpointing workload of MLPerf Storage 2.0 for Llama 3.1 8B with ZeRO-3: weights in bf16, and a
master copy and two moments in fp32, on eight ranks. Here its layers are an eighth as wide, which is 1.8 GiB in as many
tensors. Nothing is trained; there are no gradients. Every peer saves, and loads what it saved after the page cache has
dropped it, in place; sums over every tensor tell that the same bytes came back. Needs 16 GiB of memory beside what is
in use, and twice the state on the disk.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dcp_plugin
from benchmarks._harness import Report, Samples, barrier, forget, interleaved, local_of, on_ranks, remove, sync_files
from benchmarks._machine import file_system_of
from benchmarks._options import SMALLEST as _SMALLEST
from benchmarks._options import parser, scratch
from benchmarks._peer import IO_THREADS, OURS, Peer, State
from benchmarks.peers import ceiling, stock

WRAPPERS = {"FSDP2": torch.float32, "HSDP": torch.bfloat16, "MLPerf": torch.bfloat16}
SIZES = {
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256,
           "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True},
    "8b/8": {"hidden_size": 512, "intermediate_size": 1792, "num_hidden_layers": 32, "vocab_size": 16032,
             "num_attention_heads": 32, "num_key_value_heads": 8},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512,
             "num_attention_heads": 4, "tie_word_embeddings": True},
}  # fmt: skip
SMALLEST = [*_SMALLEST, "--size", "tiny", "--ranks", "2", "--wrappers", "FSDP2"]


class Training:
    """Model and optimizer of this rank, as after a step."""

    def __init__(self, wrapper: str, size: str) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        with torch.device("meta"):
            self.model: nn.Module = LlamaForCausalLM(LlamaConfig(**SIZES[size]))
        self.model.to(WRAPPERS[wrapper])
        world = dist.get_world_size()
        shape = (2, world // 2) if wrapper == "HSDP" else (world,)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.model.to_empty(device="cpu")
        self.model.tie_weights()
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        for parameter in self.model.parameters():
            slots = ("exp_avg", "exp_avg_sq", "master")[: 3 if wrapper == "MLPerf" else 2]
            dtype = torch.float32 if wrapper == "MLPerf" else parameter.dtype
            moments = {name: torch.zeros_like(parameter, dtype=dtype) for name in slots}
            self.optimizer.state[parameter] = {"step": torch.tensor(1.0), **moments}
        self.fill(dist.get_rank() % shape[-1])

    def tensors(self) -> list[torch.Tensor]:
        """This rank's memory."""
        slots = (slot for slots in self.optimizer.state.values() for slot in slots.values() if slot.numel() > 1)
        return [local_of(tensor.detach()) for tensor in (*self.model.parameters(), *slots)]

    def fill(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for tensor in self.tensors():
            tensor.view(torch.int16).random_(0, 16000, generator=generator)  # no NaN, no infinity

    def sums(self) -> list[int]:
        """Of the words of each tensor."""
        return [int(tensor.view(torch.int16).sum(dtype=torch.int64)) for tensor in self.tensors()]

    def state(self) -> dict[str, object]:
        """As stock takes it: the live tensors."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}


def _peers(training: Training, with_ceiling: bool) -> list[Peer]:
    """Return ours, stock, and the ceiling, which needs the state's memory twice."""
    ours = {"model": training.model, "optim": training.optimizer}
    ways: dict[str, tuple[Callable[[Path], object], Callable[[Path], object]]] = {
        OURS: (
            lambda path: dcp_plugin.save(ours, path, io={"threads": IO_THREADS}),
            lambda path: dcp_plugin.load(ours, path, io={"threads": IO_THREADS}),
        ),
        "stock": (
            lambda path: stock.dcp.save(training.state(), checkpoint_id=path),
            lambda path: stock.dcp.load(training.state(), checkpoint_id=path),
        ),
    }

    def as_peer(name: str) -> Peer:
        def save(_: State, path: Path) -> None:
            ways[name][0](path)

        def load(_: State, path: Path) -> None:
            ways[name][1](path)

        return Peer(name, save, load)

    return [*([_ceiling(training)] if with_ceiling else []), *map(as_peer, ways)]


def _ceiling(training: Training) -> Peer:
    memory = {str(number): tensor for number, tensor in enumerate(training.tensors())}
    peer = ceiling.PEERS[0]
    peer.prepare(memory)
    return Peer(peer.name, lambda _, path: peer.save(memory, path), lambda _, path: peer.load(memory, path))


def _measure(wrapper: str, size: str, repeats: int, root: Path) -> Samples:
    training = Training(wrapper, size)
    peers, sums = _peers(training, with_ceiling=wrapper == "MLPerf"), training.sums()
    saved_at = {peer.name: root / str(number) for number, peer in enumerate(peers)}

    def save(peer: Peer) -> None:
        peer.save({}, saved_at[peer.name])
        sync_files(saved_at[peer.name])

    def lose(peer: Peer) -> None:
        """What is in memory, and what the page cache has of the files."""
        for tensor in training.tensors():
            tensor.zero_()
        if dist.get_rank() == 0:
            forget(saved_at[peer.name])

    def load(peer: Peer) -> None:
        peer.load({}, saved_at[peer.name])

    saved = interleaved(peers, repeats, lambda peer: remove(saved_at[peer.name]), save)
    loaded = interleaved(peers, repeats, lose, load)
    for peer in peers:
        lose(peer)
        barrier()
        load(peer)
        assert training.sums() == sums, f"{peer.name} did not restore the state: its figures would mean nothing"
    return {f"save:{name}": found for name, found in saved.items()} | {
        f"load:{name}": found for name, found in loaded.items()
    }


def main() -> None:
    made = parser("llama", __doc__)
    made.add_argument("--size", choices=SIZES, default="1b", help="of the model (default %(default)s)")
    made.add_argument("--ranks", type=int, default=4, help="(default %(default)s)")
    made.add_argument("--wrappers", nargs="+", choices=WRAPPERS, default=["FSDP2", "HSDP"], help="(default both)")
    made.set_defaults(where=[Path("outputs")], repeats=3)
    options: argparse.Namespace = made.parse_args()
    report = Report("llama", options)
    for where in options.where:
        for wrapper in options.wrappers:
            with scratch(where) as root:
                both = on_ranks(options.ranks, _measure, wrapper, options.size, options.repeats, root)
                about = (
                    f"Llama {options.size}, AdamW, {wrapper}, {options.ranks} ranks, {where} ({file_system_of(root)})"
                )
                for what in ("save", "load"):
                    runs = {name.partition(":")[2]: found for name, found in both.items() if name.startswith(what)}
                    report.table(f"{'cold ' if what == 'load' else ''}{what}, {about}", runs)
    report.close()


if __name__ == "__main__":
    main()
