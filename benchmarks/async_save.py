"""What does a save in the background cost the training? Peers, ours and a plain copy of the same memory.

One process trains a byte-level GPT with AdamW; the size is that of parameters and optimizer state together. Per peer:

- blocked: what the call takes, with memory that earlier saves have warmed up;
- complete: from the call until the checkpoint is published and durable, while nothing else runs;
- step waits: what the first optimizer step after a save is held back (lazy staging may, until its copy is made);
- lost: how much longer training steps take if a save begins with them, less what the call blocked. As many steps as
  the save needs, between two runs of as many without one. What *memcpy* seems to lose is noise: it does nothing then;
- CPU: seconds of this process and its children for a save while nothing else runs;
- growth: resident memory after fifty saves over that after three (``--saves``).
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import _machine, _options
from benchmarks._background import Saver, Training, all_savers
from benchmarks._harness import remove, shuffled
from benchmarks._options import parser, scratch
from benchmarks._peer import OURS

CONTEXT = 64
SMALLEST = [*_options.SMALLEST, "--saves", "4", "--peers", "stock"]
Figures = dict[str, dict[str, list[float]]]


class GPT(nn.Module):
    """A byte-level GPT as large as asked for."""

    def __init__(self, mib: int) -> None:
        super().__init__()
        dim = 1024 if mib >= 512 else 256
        per_layer = 12 * dim * dim * 4 * 3  # bytes, with the two moments of AdamW
        depth = max(1, round(mib * 2**20 / per_layer))
        self.embed = nn.Embedding(256, dim)
        layer = nn.TransformerEncoderLayer(dim, dim // 64, 4 * dim, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(dim, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.layers(self.embed(tokens), mask, is_causal=True))  # type: ignore[no-any-return]


def _step(training: Training, saver: Saver | None = None) -> float:
    """One training step; the seconds for which its optimizer is held back."""
    tokens = torch.randint(256, (1, CONTEXT + 1))
    logits = training.model(tokens[:, :-1])
    nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    began = time.perf_counter()
    with saver.updating() if saver else nullcontext():
        waited = time.perf_counter() - began
        training.optimizer.step()
    training.optimizer.zero_grad()
    return waited


def _cpu() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def _alone(saver: Saver, path: Path) -> dict[str, float]:
    """Saves while nothing else runs."""
    cpu, began = _cpu(), time.perf_counter()
    wait = saver.save(path)
    blocked = time.perf_counter() - began
    wait()
    return {"blocked": blocked, "complete": time.perf_counter() - began, "CPU": _cpu() - cpu}


class _Steps:
    """Training steps, with a save that begins with them or without one."""

    def __init__(self, training: Training, count: int, saver: Saver | None = None, path: Path = Path()) -> None:
        began = time.perf_counter()
        wait: Callable[[], None] = saver.save(path) if saver else lambda: None
        self.blocked = time.perf_counter() - began
        waited = [_step(training, saver) for _ in range(count)]
        self.took = time.perf_counter() - began - self.blocked
        self.first_waited = waited[0]
        wait()


def _measure(savers: list[Saver], training: Training, step: float, repeats: int, root: Path) -> Figures:
    figures: Figures = defaultdict(lambda: defaultdict(list))
    counts: dict[str, int] = {}
    began = time.monotonic()
    for repetition in range(repeats + 1):
        for saver in shuffled(savers, repetition):
            _step(training)
            alone = _alone(saver, root / "alone")
            remove(root / "alone")
            count = counts.setdefault(saver.name, 1 + math.ceil(alone["complete"] / step))
            before = _Steps(training, count)
            saving = _Steps(training, count, saver, root / "among")
            remove(root / "among")
            after = _Steps(training, count)
            if repetition == 0:
                continue
            alone["blocked, training"] = saving.blocked
            alone["step waits"] = saving.first_waited
            alone["lost"] = saving.took - (before.took + after.took) / 2
            for name, value in alone.items():
                figures[saver.name][name].append(value)
        said = "warmed up" if repetition == 0 else f"{repetition} of {repeats} repetitions"
        print(f"{said} after {time.monotonic() - began:.0f} s", flush=True)
    return figures


def _growth(saver: Saver, training: Training, saves: int, root: Path) -> float:
    """Resident memory over that after the third save, MiB, after each of the others: the largest.

    What the training has freed and the C library keeps is given back before each look.
    """
    after_third, largest = 0, 0
    for number in range(saves):
        _step(training)
        saver.save(root / str(number % 2))()
        ctypes.CDLL(None).malloc_trim(0)
        resident = _machine.status_bytes("VmRSS")
        if number == 2:
            after_third = resident
        elif number > 2:
            largest = max(largest, abs(resident - after_third), key=abs)
    return largest / 2**20


def _ratio(theirs: list[float], ours: list[float]) -> str:
    above, below = statistics.median(theirs), statistics.median(ours)
    return f"{above / below:.2f}" if below > 0 else f"{above:.2f} s to nothing measurable"


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.4f} ({min(values):.3f}-{max(values):.3f})"


def _print(figures: Figures) -> None:
    columns = list(next(iter(figures.values())))
    print(f"\n{'seconds: median, least to most':32}" + "".join(f"{name:>26}" for name in columns))
    for name, runs in figures.items():
        print(f"{name:32}" + "".join(f"{_spread(runs[column]):>26}" for column in columns))
    if "memcpy" in figures and OURS in figures:
        floor = statistics.median(figures["memcpy"]["blocked"])
        print(f"\nblocked, ours ÷ memcpy: {statistics.median(figures[OURS]['blocked']) / floor:.2f}")
    for ours in (OURS, f"{OURS}, lazy"):
        for peer in (name for name in figures if name.startswith(("stock", "torch_", "Light")) and ours in figures):
            said = (f"{what} {_ratio(figures[peer][what], figures[ours][what])}" for what in ("complete", "lost"))
            print(f"{peer} ÷ {ours}: {', '.join(said)}")


def main() -> None:
    made = parser("async_save", __doc__)
    made.add_argument("--threads", type=int, default=1, help="torch's intra-op threads (default %(default)s)")
    made.add_argument("--saves", type=int, default=50, help="for the growth of memory (default %(default)s)")
    options = made.parse_args()
    options.where = options.where[:1]
    torch.set_num_threads(options.threads)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = GPT(options.mib)
    training = Training(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    _step(training)
    began = time.perf_counter()
    for _ in range(3):
        _step(training)
    step = (time.perf_counter() - began) / 3
    load = _machine.busy_cores()
    for line in (*(f"{key}: {value}" for key, value in _machine.describe().items()), _machine.busy(load)):
        print(line) if line else None
    size = sum(tensor.nbytes for tensor in training.tensors()) / 2**20
    print(
        f"{size:.0f} MiB in {len(training.tensors())} tensors, steps of {step:.2f} s with {options.threads} thread(s)"
    )
    with scratch(options.where[0]) as root:
        savers = []
        for name, make in all_savers(options.peers).items():
            try:
                savers.append(make(training))
            except ImportError as error:
                print(f"left out: {name} ({error})")
        figures = _measure(savers, training, step, options.repeats, root)
        _print(figures)
        growth = {}
        for saver in savers:
            if saver.name.startswith(OURS):
                growth[saver.name] = _growth(saver, training, options.saves, root)
                print(f"{saver.name}: resident memory over {options.saves} saves: {growth[saver.name]:+.1f} MiB")
            saver.close()
    out: Path = options.json or Path("outputs/benchmark-async_save.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    said = {"machine": _machine.describe(), "load_before": load, "load_after": _machine.busy_cores()}
    said |= {"mib": size, "step": step, "threads": options.threads, "figures": figures, "growth_mib": growth}
    out.write_text(json.dumps(said, indent=2, ensure_ascii=False) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
