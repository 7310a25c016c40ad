"""Would a lossless codec pay? Ratio and speed on the state of a training, and the bandwidth below which it does.

A GPT over bytes trains on the standard library's source under AdamW, once in fp32 and once in bf16, parameters and
moments alike. Each of its matrices is packed by itself, as an item of a checkpoint would be: with zstd, as DCP's stream
transform does and stock reads it; with zstd after the bytes of each element were taken apart, sign and exponent from
mantissa, as ZipNN does, which stock does not read; and with lz4, where that is installed. What is unpacked is compared
byte for byte.

Seconds are CPU seconds of one thread. A codec that works while the bytes travel saves time where a rank's share of the
link is slower than what its threads pack; one that works before they do, below the *break-even* bandwidth: the bytes
that it saves per CPU second, times the threads.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import zstandard
from torch.func import functional_call

from benchmarks import _machine
from examples.gpt import GPT
from examples.stdlib_text import stdlib_source

SMALLEST = ["--dim", "48", "--depth", "1", "--steps", "2", "--repeats", "1", "--threads", "2"]
CONTEXT, BATCH = 128, 8
_SMALL = 4096  # items below do not matter, and have no room for a ratio
_SAMPLE = 1 << 16
_WORTH_IT = 0.98  # of a plane's sample; others are kept as they are

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Items = list[torch.Tensor]


@dataclass(frozen=True)
class Codec:
    """A way to make bytes fewer."""

    name: str
    pack: Callable[[torch.Tensor], list[bytes]]
    unpack: Callable[[list[bytes], torch.dtype], Bytes]
    stock: bool
    """Whether DCP of a plain installation of torch, with zstandard beside it, reads it."""


def _bytes_of(tensor: torch.Tensor) -> Bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy()  # type: ignore[no-any-return]


def _zstd(level: int) -> Codec:
    packing, unpacking = zstandard.ZstdCompressor(level=level), zstandard.ZstdDecompressor()
    return Codec(
        f"zstd {level}",
        lambda tensor: [packing.compress(_bytes_of(tensor))],
        lambda data, dtype: np.frombuffer(unpacking.decompress(data[0]), np.uint8),
        stock=True,
    )


def _lz4() -> Iterable[Codec]:
    try:
        import lz4.frame as lz4
    except ImportError:
        return
    yield Codec(
        "lz4",
        lambda tensor: [lz4.compress(_bytes_of(tensor))],
        lambda data, dtype: np.frombuffer(lz4.decompress(data[0]), np.uint8),
        stock=False,
    )


def _words(itemsize: int) -> Any:
    return {2: np.uint16, 4: np.uint32}[itemsize]


def _planes(tensor: torch.Tensor) -> list[Bytes]:
    """The n-th bytes of all elements together, after the sign has moved behind the mantissa: so the exponent is one
    byte."""
    itemsize = tensor.element_size()
    words = _bytes_of(tensor).view(_words(itemsize))
    turned = (words << 1) | (words >> (8 * itemsize - 1))
    bytes_ = turned.view(np.uint8).reshape(-1, itemsize)
    return [np.ascontiguousarray(bytes_[:, place]) for place in range(itemsize)]


def _joined(planes: list[Bytes]) -> Bytes:
    itemsize = len(planes)
    words = np.stack(planes, axis=1).reshape(-1).view(_words(itemsize))
    return ((words >> 1) | (words << (8 * itemsize - 1))).view(np.uint8)


def _planes_and_zstd(level: int) -> Codec:
    packing, unpacking = zstandard.ZstdCompressor(level=level), zstandard.ZstdDecompressor()

    def pack(tensor: torch.Tensor) -> list[bytes]:
        found = []
        for plane in _planes(tensor):
            middle = max(0, len(plane) - _SAMPLE) // 2
            sample = plane[middle : middle + _SAMPLE]
            worth_it = len(packing.compress(sample)) < _WORTH_IT * len(sample)
            found.append(b"z" + packing.compress(plane) if worth_it else b"r" + plane.tobytes())
        return found

    def unpack(data: list[bytes], dtype: torch.dtype) -> Bytes:
        plain = (memoryview(one)[1:] if one[:1] == b"r" else unpacking.decompress(one[1:]) for one in data)
        return _joined([np.frombuffer(one, np.uint8) for one in plain])

    return Codec(f"planes, zstd {level}", pack, unpack, stock=False)


CODECS = [_zstd(1), _zstd(3), _planes_and_zstd(1), _planes_and_zstd(3), *_lz4()]


def trained(dtype: torch.dtype, dim: int, depth: int, steps: int) -> tuple[dict[str, Items], float]:
    """The matrices of a model and its optimizer, by what they are; and the last loss. What is computed in between is
    in fp32: many CPUs are slow in bf16, and it is not saved."""
    torch.manual_seed(0)
    gpt = GPT(dim=dim, depth=depth, heads=4, context=CONTEXT, dropout=0.0).to(dtype)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    text = stdlib_source(1 << 22)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (step + 1) / max(1, steps // 10))
        starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,)).tolist()
        windows = torch.stack([text[start : start + CONTEXT + 1] for start in starts]).long()
        widened = {name: one.float() for name, one in gpt.named_parameters()}
        logits = functional_call(gpt, widened, (windows[:, :-1],))
        loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    matrices = [one for one in gpt.parameters() if one.numel() * one.element_size() >= _SMALL and one.dim() > 1]
    states = [optimizer.state[one] for one in matrices]
    moments: dict[str, Items] = {name: [state[name] for state in states] for name in ("exp_avg", "exp_avg_sq")}
    return {"parameters": [one.detach() for one in matrices], **moments}, loss.item()


def measure(codec: Codec, items: Items, repeats: int) -> dict[str, float]:
    """Bytes that are left of each, and bytes per CPU second of packing and unpacking."""
    raw = sum(item.numel() * item.element_size() for item in items)
    packing, unpacking = [], []
    for _ in range(repeats):
        began = time.thread_time()
        packed = [codec.pack(item) for item in items]
        packing.append(time.thread_time() - began)
        began = time.thread_time()
        unpacked = [codec.unpack(data, item.dtype) for data, item in zip(packed, items, strict=True)]
        unpacking.append(time.thread_time() - began)
        for item, found in zip(items, unpacked, strict=True):
            assert np.array_equal(_bytes_of(item), found), f"{codec.name} is not lossless"
    kept = sum(len(part) for data in packed for part in data)
    return {
        "bytes": raw,
        "left": kept / raw,
        "pack B/s": raw / statistics.median(packing),
        "unpack B/s": raw / statistics.median(unpacking),
    }


def _together(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The row of all kinds of one state."""
    raw = sum(row["bytes"] for row in rows)
    return {
        "bytes": raw,
        "left": sum(row["bytes"] * row["left"] for row in rows) / raw,
        **{name: raw / sum(row["bytes"] / row[name] for row in rows) for name in ("pack B/s", "unpack B/s")},
    }


def _judged(row: dict[str, Any], threads: int) -> dict[str, Any]:
    """With what follows for a link. Nothing is saved where nothing is left out."""
    saved = max(0.0, 1 - row["left"])
    return {
        **row,
        "break-even save, B/s": saved * row["pack B/s"] * threads,
        "break-even load, B/s": saved * row["unpack B/s"] * threads,
        "overlapped save, B/s": row["pack B/s"] * threads * row["left"] if saved else 0.0,
    }


def _print(dtype: str, rows: list[dict[str, Any]], threads: int) -> None:
    print(f"\n{dtype}; MB/s: pack and unpack of one thread, break-even of {threads}")
    head = ("left of 100", "pack", "unpack", "break-even: save", "load")
    print(f"{'':18}{'':12}" + "".join(f"{name:>{len(name) + 3}}" for name in head))
    for row in rows:
        figures = [f"{100 * row['left']:.1f}"]
        names = ("pack B/s", "unpack B/s", "break-even save, B/s", "break-even load, B/s")
        figures += [f"{row[name] / 1e6:.0f}" for name in names]
        cells = "".join(f"{text:>{len(name) + 3}}" for text, name in zip(figures, head, strict=True))
        print(f"{row['codec']:18}{row['of']:12}{cells}")


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m benchmarks codec", description=__doc__.splitlines()[0])
    parser.add_argument("--dim", type=int, default=256, help="(default %(default)s)")
    parser.add_argument("--depth", type=int, default=4, help="(default %(default)s)")
    parser.add_argument("--steps", type=int, default=300, help="of the training (default %(default)s)")
    kinds = ("float32", "bfloat16")
    parser.add_argument("--dtypes", nargs="+", default=kinds, choices=kinds, help="(default %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of a rank, for the codec (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, default=Path("outputs/benchmark-codec.json"))
    options = parser.parse_args()
    load = _machine.busy_cores()
    print(_machine.busy(load))
    rows = []
    for name in options.dtypes:
        state, loss = trained(getattr(torch, name), options.dim, options.depth, options.steps)
        found = []
        for codec in CODECS:
            kinds = [{"of": of, **measure(codec, items, options.repeats)} for of, items in state.items()]
            for row in (*kinds, {"of": "all", **_together(kinds)}):
                about = {"dtype": name, "codec": codec.name, "stock reads it": codec.stock}
                found.append(_judged({**about, **row}, options.threads))
        _print(f"{name}, loss {loss:.2f} after {options.steps} steps", found, options.threads)
        rows += found
    about = {
        "machine": _machine.describe(),
        "load_before": load,
        "options": {k: str(v) for k, v in vars(options).items()},
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({**about, "rows": rows}, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
