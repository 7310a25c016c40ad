"""On a GPU: device tensors, NCCL, fused optimizers, CPU-offloaded FSDP.

``TEST_DEVICE=cpu`` runs every body on the CPU, over gloo. Then nothing is pinned, streams and graphs run at once, FSDP
offloads nothing, and ``torch.compile`` compiles nothing. Without it and without CUDA the tests are skipped.

A call of CUDA at import would spoil it in the ranks, which are forked from a process that has imported this module.
"""

from __future__ import annotations

import gc
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import dcp_plugin as dcp
from tests import sampling
from tests.compare import assert_same, full, same_bytes
from tests.conformance import tensors as corpus
from tests.launch import on_ranks
from tests.layouts import Net, whole_state
from tests.limits import for_seconds

DEVICE = os.environ.get("TEST_DEVICE", "cuda")
ON_GPU = DEVICE == "cuda"
SECONDS = float(os.environ.get("TEST_SECONDS", "30"))
"""Budget for the sample of the corpus of tensors."""


@pytest.fixture(autouse=True)
def _device() -> None:
    """Skip the test without a GPU. Only pytest's process asks for one, before a rank does."""
    if ON_GPU and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device; TEST_DEVICE=cpu runs the same bodies on the CPU")


@pytest.fixture
def _two_devices() -> None:
    if ON_GPU and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")


def _why_no_compiler() -> str:
    if not ON_GPU:
        return ""
    if find_spec("triton") is None:
        return "torch.compile needs triton"
    compilers = (os.environ.get("CC", "cc"), "gcc", "clang")
    return "" if any(map(shutil.which, compilers)) else "torch.compile needs a C compiler"


def _fsdp1(model: nn.Module, **options: Any) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=_rank_device(), **options)


def _fsdp2(model: nn.Module, **options: Any) -> nn.Module:
    mesh = init_device_mesh(DEVICE, (1,))
    fully_shard(model.block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def _rank_device() -> torch.device:
    return torch.device("cuda", 0) if ON_GPU else torch.device("cpu")


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "ddp": DistributedDataParallel,
    "fsdp1": lambda model: _fsdp1(model, use_orig_params=True),
    "fsdp1 flat": _fsdp1,
    "fsdp1 offloaded": lambda model: _fsdp1(model, cpu_offload=CPUOffload(ON_GPU), use_orig_params=True),
    "fsdp2": _fsdp2,
    "fsdp2 offloaded": lambda model: _fsdp2(model, **({"offload_policy": CPUOffloadPolicy()} if ON_GPU else {})),
    "compiled": lambda model: torch.compile(model, backend="inductor" if ON_GPU else "eager"),
}
COMPILED = pytest.mark.skipif(bool(_why_no_compiler()), reason=_why_no_compiler() or "there is a compiler")


def _make(kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = WRAPS[kind](Net().to(DEVICE))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, fused="offloaded" not in kind)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        model(torch.randn(8, 6, generator=generator).to(DEVICE)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _use_nccl() -> None:
    dist.destroy_process_group()
    backend, device = ("cpu:gloo,cuda:nccl", _rank_device()) if ON_GPU else ("gloo", None)
    dist.init_process_group(backend, device_id=device)
    warnings.simplefilter("ignore")


def _on_side_stream() -> AbstractContextManager[object]:
    return torch.cuda.stream(torch.cuda.Stream()) if ON_GPU else nullcontext()


def _products(big: torch.Tensor, count: int = 20) -> torch.Tensor:
    """Queue work that the device has not finished when this returns."""
    product = big
    for _ in range(count):
        product = product @ big / len(big) ** 0.5
    return product


def _big() -> torch.Tensor:
    return torch.randn(*((4096, 4096) if ON_GPU else (256, 256)), device=DEVICE)


@pytest.mark.parametrize(
    "kinds",
    [[kind for kind in WRAPS if kind != "compiled"], pytest.param(["plain", "fsdp2", "compiled"], marks=COMPILED)],
)
@on_ranks(1)
def test_every_wrapper_loads_what_any_other_saved(tmp_path: Path, kinds: list[str]) -> None:
    _use_nccl()
    saved = {}
    for kind in kinds:
        model, optimizer = _make(kind, 0)
        _train(model, optimizer, 3)
        dcp.save({"model": model, "optim": optimizer}, tmp_path / kind)
        saved[kind] = whole_state(model, optimizer)
    for kind in kinds:
        for source in kinds:
            model, optimizer = _make(kind, 1)
            dcp.load({"model": model, "optim": optimizer}, tmp_path / source)
            state = whole_state(model, optimizer)
            hyper = [key for key in state if key.endswith(".fused")]  # differs for the offloaded ones
            assert_same(
                {key: value for key, value in state.items() if key not in hyper},
                {key: value for key, value in saved[source].items() if key not in hyper},
            )
            devices = {slot.device.type for slots in optimizer.state.values() for slot in slots.values()}
            assert devices <= {"cpu", DEVICE}
            if source == kind:
                _train(model, optimizer, 1)


@pytest.mark.parametrize("staging", ["blocking", "lazy"])
@on_ranks(1)
def test_background_saves_hold_the_state_of_their_call(tmp_path: Path, staging: str) -> None:
    _use_nccl()
    ours = dcp.Checkpointer(async_save=True, staging=staging)
    model, optimizer = _make("fsdp2", 0)
    expected = []
    for step in range(3):
        _train(model, optimizer, 1, seed=step)
        expected.append(whole_state(model, optimizer))
        ours.save({"model": model, "optim": optimizer}, tmp_path / str(step), step)
        _train(model, optimizer, 3, seed=step)
    ours.close()
    for step, state in enumerate(expected):
        other, fresh = _make("fsdp2", 1)
        dcp.load({"model": other, "optim": fresh}, tmp_path / str(step))
        assert_same(whole_state(other, fresh), state)


@pytest.mark.parametrize("options", [{}, {"async_save": True}, {"async_save": True, "staging": "lazy"}])
@on_ranks(1, 2)
def test_a_default_device_changes_no_save_and_no_load(tmp_path: Path, world_size: int, options: dict[str, Any]) -> None:
    torch.set_default_device(DEVICE)
    state = {"on device": torch.randn(5, 7), "on host": torch.ones(300, device="cpu"), "number": [1, "text"]}
    ours = dcp.Checkpointer(**options)
    for number in range(2):
        ours.save(state, tmp_path / str(number))
    ours.close()
    target = {"on device": torch.zeros(5, 7), "on host": torch.zeros(300, device="cpu"), "number": None}
    dcp.load(target, tmp_path / "1")
    assert target["on device"].device.type == DEVICE and target["on host"].is_cpu
    assert_same(target, state)
    assert dcp.verify(tmp_path / "1").ok
    assert_same(dcp.read(tmp_path / "1", include=["on device"]), {"on device": state["on device"].cpu()})


def test_the_host_copy_of_device_memory_is_pinned_and_reused(tmp_path: Path) -> None:
    model = nn.Linear(1000, 1000).to(DEVICE)
    ours = dcp.Checkpointer(async_save=True, staging="lazy")
    pool = ours._writer.pool
    places = set()
    for number in range(3):
        ours.save({"model": model}, tmp_path / str(number)).wait()
        (slab,) = pool.slabs
        assert slab.is_pinned() == ON_GPU
        places.add(slab.data_ptr())
        del slab
    assert len(places) == 1
    ours.close()
    assert not pool.nbytes
    target = nn.Linear(1000, 1000).to(DEVICE)
    dcp.load({"model": target}, tmp_path / "2")
    assert_same(target.state_dict(), model.state_dict())


def test_the_memory_of_a_dropped_checkpointer_can_be_pinned_again(tmp_path: Path) -> None:
    """CUDA refuses an address that was released while it was registered."""
    state = {"x": torch.randn(1 << 16, device=DEVICE)}

    def save_and_drop(path: Path) -> None:
        ours = dcp.Checkpointer(async_save=True)
        ours.save(state, path).wait()
        del ours
        gc.collect()

    for number in range(5):
        with pytest.warns(ResourceWarning):
            save_and_drop(tmp_path / str(number))
    assert all(dcp.verify(tmp_path / str(number)).ok for number in range(5))


def test_a_save_without_device_memory_may_follow_one_with_it(tmp_path: Path) -> None:
    ours = dcp.Checkpointer(async_save=True)
    for device in (DEVICE, "cpu", DEVICE):
        ours.save({"x": torch.ones(1000, device=device)}, tmp_path / "ck")
    ours.close()
    assert dcp.verify(tmp_path / "ck").ok


def test_a_lazy_copy_waits_for_what_the_device_has_still_to_compute_and_is_waited_for(tmp_path: Path) -> None:
    big = _big()
    model = nn.Linear(len(big), len(big), bias=False).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    ours = dcp.Checkpointer(async_save=True, staging="lazy")
    for number in range(3):
        with torch.no_grad():
            product = _products(big)
            model.weight.copy_(product)
        ours.save({"model": model}, tmp_path / str(number))
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        target = nn.Linear(len(big), len(big), bias=False).to(DEVICE)
        ours.load({"model": target}, tmp_path / str(number))
        assert_same({"w": target.weight.detach()}, {"w": product})
    ours.close()


@pytest.mark.parametrize("options", [{}, {"async_save": True}, {"async_save": True, "staging": "lazy"}])
def test_a_save_waits_for_the_stream_of_its_caller(tmp_path: Path, options: dict[str, Any]) -> None:
    model = nn.Module()
    with dcp.Checkpointer(**options) as ours, _on_side_stream(), torch.no_grad():
        product = _products(_big())
        model.weight = nn.Parameter(product.clone())
        ours.save({"model": model, "plain": product}, tmp_path / "ck")
        ours.wait()
        target = {"model": nn.Module(), "plain": torch.zeros_like(product)}
        target["model"].weight = nn.Parameter(_products(product))
        ours.load(target, tmp_path / "ck")
        assert_same({"w": target["model"].weight, "plain": target["plain"]}, {"w": product, "plain": product})


def test_replays_of_a_graph_beside_a_lazy_save_leave_it_as_it_is(tmp_path: Path) -> None:
    """The graph reads the weights. Another replay writes them, after the copy."""
    model = nn.Linear(64, 64).to(DEVICE)
    data, output = torch.ones(8, 64, device=DEVICE), torch.zeros(8, 64, device=DEVICE)

    def forward() -> None:
        output.copy_(model(data))

    def update() -> None:
        model.weight.mul_(0.5)

    with torch.no_grad(), dcp.Checkpointer(async_save=True, staging="lazy") as ours:
        replays = list(map(_captured, (forward, update)))
        replays[1]()
        before = {key: value.clone() for key, value in model.state_dict().items()}
        handle = ours.save({"model": model}, tmp_path / "ck")
        replays[0]()
        handle.wait_staged()
        replays[1]()
    target = nn.Linear(64, 64).to(DEVICE)
    dcp.load({"model": target}, tmp_path / "ck")
    assert_same(target.state_dict(), before)


def _captured(work: Callable[[], None]) -> Callable[[], None]:
    """Return the work as a replayed graph; on the CPU, the work itself."""
    if not ON_GPU:
        return work
    with _on_side_stream():
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


@on_ranks(1)
def test_segments_of_the_allocator_may_grow(tmp_path: Path) -> None:
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    model, optimizer = _make("plain", 0)
    with dcp.Checkpointer(async_save=True, staging="lazy") as ours:
        for number in range(3):
            _train(model, optimizer, 1)
            ours.save({"model": model, "optim": optimizer}, tmp_path / "ck")
            torch.randn(1 << 20 << number, device=DEVICE)
    other, fresh = _make("plain", 1)
    dcp.load({"model": other, "optim": fresh}, tmp_path / "ck")
    assert_same(whole_state(other, fresh), whole_state(model, optimizer))


@pytest.mark.usefixtures("_two_devices")
@on_ranks(1)
def test_threads_of_a_save_and_a_load_use_no_other_device(tmp_path: Path) -> None:
    """A context on device 0, by the process of every rank, takes some 500 MB each."""
    device = torch.device("cuda", 1) if ON_GPU else torch.device("cpu")
    if ON_GPU:
        torch.cuda.set_device(device)
    model = nn.Linear(2000, 2000, device=device)
    with dcp.Checkpointer(async_save=True, staging="lazy") as ours:
        ours.save({"model": model}, tmp_path / "lazy").wait()
    dcp.save({"model": model}, tmp_path / "ck")
    dcp.load({"model": model}, tmp_path / "ck")
    assert not ON_GPU or not torch._C._cuda_hasPrimaryContext(0)


def test_what_the_device_saved_loads_on_the_host_and_back(tmp_path: Path) -> None:
    big = torch.randn(3 << 19, dtype=torch.float64, device=DEVICE)
    dcp.save({"t": big, "half": big.bfloat16(), "turned": big.reshape(512, -1).t()}, tmp_path / "ck")
    target = {
        "t": torch.zeros_like(big, device="cpu"),
        "half": torch.zeros_like(big, dtype=torch.bfloat16),
        "turned": torch.zeros(big.numel() // 512, 512, dtype=torch.float64, device=DEVICE),
    }
    dcp.load(target, tmp_path / "ck")
    assert_same(target, {"t": big, "half": big.bfloat16(), "turned": big.reshape(512, -1).t()})


def test_what_the_device_has_still_to_compute_is_saved_and_tensors_of_many_blocks_come_back(tmp_path: Path) -> None:
    """Copies run on streams of their own: they must wait for the caller's work, and blocks for the copies."""
    product = _products(_big())
    state = {"product": product, "turned": product.t(), "columns": product[:, 100:3000], "half": product.half()}
    dcp.save(state, tmp_path / "ck")
    target = {key: torch.zeros_like(value) for key, value in state.items()}
    dcp.load(target, tmp_path / "ck")
    assert_same(target, state)


@pytest.mark.parametrize("options", [{}, {"async_save": True}])
def test_conjugated_and_negated_views_are_saved_as_what_they_show(tmp_path: Path, options: dict[str, Any]) -> None:
    """Torch conjugates and negates on the host, after a copy that may still be on its way."""
    numbers = torch.randn(1 << (22 if ON_GPU else 12), dtype=torch.complex64, device=DEVICE)
    state = {"conjugated": numbers.conj(), "negated": numbers.conj().imag, "turned": numbers.reshape(64, -1).t().conj()}
    with dcp.Checkpointer(**options) as ours:
        ours.save(state, tmp_path / "ck")
    target = {key: torch.zeros_like(value.resolve_conj().resolve_neg()) for key, value in state.items()}
    dcp.load(target, tmp_path / "ck")
    assert_same(target, {key: value.resolve_conj().resolve_neg() for key, value in state.items()})


@pytest.mark.parametrize("name", [name for name in corpus.DTYPES if getattr(torch, name).itemsize == 1])
def test_trained_weights_of_one_byte_are_saved_lazily(tmp_path: Path, name: str) -> None:
    """A few elements of all of them are joined on the device, where torch.cat knows few of these dtypes."""
    model, target = nn.Module(), nn.Module()
    for number in range(3):
        bits = torch.randint(0, 2, (40, 8), dtype=torch.uint8, device=DEVICE).view(getattr(torch, name))
        model.register_parameter(f"w{number}", nn.Parameter(bits, requires_grad=bits.is_floating_point()))
        target.register_parameter(f"w{number}", nn.Parameter(torch.zeros_like(bits), requires_grad=False))
    with dcp.Checkpointer(async_save=True, staging="lazy") as ours:
        ours.save({"model": model}, tmp_path / "ck")
    dcp.load({"model": target}, tmp_path / "ck")
    assert_same(target.state_dict(), model.state_dict())


def test_a_sample_of_the_corpus_of_tensors_is_restored_as_on_the_host(tmp_path: Path) -> None:
    cases = [
        (name, place) for name, entry in corpus.TENSORS.items() if entry.world_size == 1 for place in entry.variants
    ]
    first = sampling.number("corpus on a device", len(cases))
    compared = []
    for number, (name, place) in enumerate(for_seconds(SECONDS, cases[first:] + cases[:first])):
        with _no_warnings():
            ended = {
                device: _outcome(name, place, device, tmp_path / f"{number}-{device}") for device in ("cpu", DEVICE)
            }
        if ended[DEVICE] != "the device cannot make it":
            assert ended[DEVICE] == ended["cpu"], (name, place)
            compared.append(name)
    assert compared


@contextmanager
def _no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _outcome(name: str, place: str, device: str, path: Path) -> str:
    """Save a tensor of the corpus, load it into another, and return how that ended."""
    states = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        try:
            with torch.device(device):
                states.append(corpus.put(place, corpus.TENSORS[name].make()))
        except (RuntimeError, NotImplementedError):
            return "the device cannot make it"
    (saved, look), (loaded, look_again) = states
    right = look()
    try:
        dcp.save(saved, path)
        dcp.load(loaded, path)
    except dcp.CheckpointError as error:
        return type(error).__name__
    try:
        return "restored" if _same(right, look_again()) else "other bytes"
    except (RuntimeError, NotImplementedError):
        return "not compared"


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return same_bytes(full(one), full(other))
    return bool(repr(one) == repr(other))
