"""Whatever a tensor is: it comes back as stock DCP would bring it back, or is refused by name. None ends the process.

Everything runs in a process of its own, because what fails here is a segmentation fault.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.two_tensor import TwoTensor

import dcp_plugin as dcp
from dcp_plugin.core.tensors import _torch_sharded
from tests import ways
from tests.compare import same_bytes
from tests.damage import flip_byte
from tests.launch import on_ranks
from tests.ways import LOADS

Make = Callable[[int], torch.Tensor]
"""A tensor of a kind; another number, other values."""


def _numbers(at: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    count = torch.Size(shape or (4, 6)).numel()
    return ((torch.arange(count) * 7 + at) % 100).reshape(shape or (4, 6)).to(dtype)


def _of_dtype(dtype: torch.dtype) -> Make:
    def make(at: int) -> torch.Tensor:
        most = 2 if dtype is torch.bool else 100
        return (_numbers(at, 4 * dtype.itemsize * 6) % most).to(torch.uint8).view(dtype).reshape(4, -1)

    return make


def _two(at: int, *shape: int) -> TwoTensor:
    return TwoTensor(_numbers(at, *shape), _numbers(at + 50, *shape))


class _Named(torch.Tensor):
    """A subclass with memory."""


class _SavedAsShards(torch.Tensor):
    """A subclass with the part of DCP's protocol that a save needs, and without the part that finds shards."""

    def __create_write_items__(self, fqn: str, value: Any) -> list[Any]:
        return []


class _Scaled(torch.Tensor):
    """A wrapper subclass as torchao makes them: parts of other dtypes, and a context."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, bits: int) -> _Scaled:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.bfloat16, device=codes.device)
        made.codes, made.scale, made.bits = codes, scale, bits
        return made  # type: ignore[no-any-return]

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, bits: int) -> None: ...

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], {"bits": self.bits}  # type: ignore[attr-defined]

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> _Scaled:
        return cls(inner["codes"], inner["scale"], context["bits"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        ops = torch.ops.aten
        if func in (ops.detach.default, ops.clone.default):
            one = args[0]
            return cls(func(one.codes), func(one.scale), one.bits)
        if func is ops.view.default:  # DTensor.from_local makes one
            return cls(args[0].codes, args[0].scale, args[0].bits)
        if func is ops.is_pinned.default:
            return False
        if func is ops.copy_.default and cls is _Scaled:
            one, other = args[:2]
            plain = not isinstance(other, cls)  # it takes plain numbers, too
            one.codes.copy_(other.to(torch.int8) if plain else other.codes)
            one.scale.copy_(torch.ones(4) if plain else other.scale)
            return one
        raise NotImplementedError(f"{func} is not known to {cls.__name__}")


class _Sealed(_Scaled):
    """One that does not even know how to be copied to."""


def _scaled(at: int) -> _Scaled:
    return _Scaled(_numbers(at, dtype=torch.int8), _numbers(at, 4), 8)


class _Closed(torch.Tensor):
    """A wrapper subclass that nobody can take apart."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> _Closed:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls(args[0].inner) if func is torch.ops.aten.detach.default else NotImplemented


def _checkpointable(tensor: torch.Tensor, shape: Any, offsets: Any, starts: Any, sizes: Any) -> torch.Tensor:
    """A tensor with the fields of ``CheckpointableTensor``, which torch knows from 2.14 on."""
    fields: Any = tensor
    fields.global_shape, fields.global_offsets = shape, offsets
    fields.local_offsets, fields.local_sizes = starts, sizes
    return tensor


def _left_by_grad(at: int) -> torch.Tensor:
    left = []
    torch.func.grad(lambda x: (left.append(x * 1), x.sum())[1])(_numbers(at))
    return left[0]


DTYPES = [
    dtype
    for dtype in {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    if not str(dtype).removeprefix("torch.").startswith(("q", "bits"))  # only as part of a quantized tensor; nobody's
]
SMALLER_THAN_A_BYTE = [d for d in DTYPES if str(d)[-1] in "1234567" and str(d)[-2] == "t"]

KINDS: dict[str, Make] = {
    **{str(dtype).removeprefix("torch."): _of_dtype(dtype) for dtype in DTYPES if dtype not in SMALLER_THAN_A_BYTE},
    "transposed": lambda at: _numbers(at).mT,
    "strided": lambda at: _numbers(at, 8, 12)[::2, ::3],
    "slice": lambda at: _numbers(at, 100)[3:27].view(4, 6),
    "scalar": lambda at: torch.tensor(float(at)),
    "empty": lambda at: torch.empty(0, 3),
    "conjugate": lambda at: (_numbers(at) * (1 + 2j)).conj(),
    "imaginary": lambda at: (_numbers(at) * (1 + 2j)).conj().imag,
    "negative": lambda at: torch._neg_view(_numbers(at)),
    "named": lambda at: _numbers(at).as_subclass(_Named),
    "buffer": lambda at: nn.Buffer(_numbers(at)),
    "parameter": lambda at: nn.Parameter(_numbers(at)),
    "left_by_grad": _left_by_grad,
    "quantized": lambda at: torch.quantize_per_tensor(_numbers(at), 0.5, 3, torch.quint8),
    "quantized_otherwise": lambda at: torch.quantize_per_tensor(_numbers(at), 0.5 + at, at, torch.quint8),
    "quantized_by_channel": lambda at: torch.quantize_per_channel(
        _numbers(at), torch.full((4,), 0.5), torch.zeros(4, dtype=torch.int64), 0, torch.qint8
    ),
    "two": _two,
    "two_of_two": lambda at: TwoTensor(_two(at), _two(at + 3)),
    "two_as_parameter": lambda at: nn.Parameter(_two(at)),
    "two_with_offset": lambda at: TwoTensor(_numbers(at, 100)[3:27].view(4, 6), _numbers(at + 1, 100)[3:27].view(4, 6)),
    "two_transposed": lambda at: _two(at).t(),
    "two_scalars": lambda at: TwoTensor(torch.tensor(1.0 + at), torch.tensor(2.0 + at)),
    "scaled": _scaled,
    "sealed": lambda at: _Sealed(_numbers(at, dtype=torch.int8), _numbers(at, 4), 8),
    "collective": lambda at: AsyncCollectiveTensor(_numbers(at)),
    "local_shards": lambda at: LocalShardsWrapper([_numbers(at, 4, 2), _numbers(at + 9, 4, 4)], [(0, 0), (0, 2)]),
    "checkpointable": lambda at: _checkpointable(
        _numbers(at, 5, 8), (4, 6), ((0, 0), (2, 0)), ((0, 0), (3, 1)), ((2, 6), (2, 6))
    ),
}

REFUSED: dict[str, tuple[Make, str]] = {
    "coo": (lambda at: _numbers(at).to_sparse(), "densify"),
    "csr": (lambda at: _numbers(at).to_sparse_csr(), "densify"),
    "csc": (lambda at: _numbers(at).to_sparse_csc(), "densify"),
    "bsr": (lambda at: _numbers(at).to_sparse_bsr((2, 2)), "densify"),
    "sparse_parameter": (lambda at: nn.Parameter(_numbers(at).to_sparse()), "densify"),
    "mkldnn": (lambda at: _numbers(at).to_mkldnn(), "densify"),
    "nested": (lambda at: torch.nested.nested_tensor([_numbers(at, 2, 3), _numbers(at, 4, 3)]), "values"),
    "jagged": (
        lambda at: torch.nested.nested_tensor([_numbers(at, 2), _numbers(at, 4)], layout=torch.jagged),
        "values",
    ),
    "fake": (lambda at: _fake(), "no values"),
    "functional": (lambda at: torch._to_functional_tensor(_numbers(at)), "without memory"),
    "left_by_vmap": (lambda at: _left_by_vmap(at), "without memory"),
    "zero": (lambda at: torch._efficientzerotensor((4, 6)), "without memory"),
    "closed": (lambda at: _Closed(_numbers(at)), "__tensor_flatten__"),
    "two_of_sparse": (lambda at: TwoTensor(_Closed(_numbers(at)), _Closed(_numbers(at))), "__tensor_flatten__"),
    "masked": (lambda at: _masked(at), "__tensor_flatten__"),
    "lazy_parameter": (lambda at: nn.UninitializedParameter(), "lazy module"),
    "lazy_buffer": (lambda at: nn.UninitializedBuffer(), "lazy module"),
    "freed": (lambda at: _freed(0), "freed"),
    "freed_in_part": (lambda at: _freed(8), "freed"),
    "contradictory": (lambda at: _checkpointable(_numbers(at), (4, 6), ((3, 0),), ((0, 0),), ((2, 6),)), "not inside"),
    **{str(d): (_of_dtype(d), "torch.uint8") for d in SMALLER_THAN_A_BYTE},
    "saved_as_shards": (lambda at: _numbers(at).as_subclass(_SavedAsShards), "Add __create_chunk_list__"),
}


def _fake() -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(4, 6)


def _left_by_vmap(at: int) -> torch.Tensor:
    left = []
    torch.vmap(lambda x: (left.append(x * 1), x)[1])(_numbers(at))
    return left[0]


def _masked(at: int) -> torch.Tensor:
    from torch.masked import masked_tensor

    return masked_tensor(_numbers(at), _numbers(at) > 50)


def _freed(left: int) -> torch.Tensor:
    tensor = _numbers(1)
    tensor.untyped_storage().resize_(left)
    return tensor


def _content(value: Any) -> Any:
    """All that a tensor is: class, shape and bytes, of its parts if it consists of some."""
    value = _torch_sharded.settled(value)
    if isinstance(value, DTensor):
        return _content(value.to_local())
    if isinstance(value, LocalShardsWrapper):
        return [_content(shard) for shard in value.local_shards()]
    if hasattr(value, "global_shape"):
        fields = zip(value.local_offsets, value.local_sizes, strict=True)
        boxes = [tuple(slice(at, at + size) for at, size in zip(*one, strict=True)) for one in fields]
        return [_content(value.detach()[box].clone()) for box in boxes]
    if hasattr(value, "__tensor_flatten__"):
        names, context = value.__tensor_flatten__()
        return [type(value), tuple(value.shape), context, [_content(getattr(value, name)) for name in names]]
    if value.is_quantized:
        scales = (
            value.q_scale() if value.qscheme() is torch.per_tensor_affine else value.q_per_channel_scales().tolist()
        )
        return [scales, _content(value.int_repr())]
    return value.detach().as_subclass(torch.Tensor).resolve_neg().clone()


def _differ(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) != len(other) or any(itertools.starmap(_differ, zip(one, other, strict=True)))
    return not same_bytes(one, other)


def _assert_same(found: Mapping[str, Any], wanted: Mapping[str, Any], what: str) -> None:
    wrong = [key for key in wanted if _differ(_content(found[key]), _content(wanted[key]))]
    assert not wrong, f"{what}: {wrong}"


def _save_async(state: Any, path: Path, staging: Any) -> None:
    checkpointer = dcp.Checkpointer(async_save=True, staging=staging)
    checkpointer.save(state, path).wait()
    checkpointer.close()


SAVES: dict[str, ways.Way] = {
    **ways.SAVES,
    "async": lambda state, path: _save_async(state, path, "blocking"),
    "lazy": lambda state, path: _save_async(state, path, "lazy"),
}
ONLY_OURS = {"sealed", "quantized_otherwise"}
if not hasattr(stock, "CheckpointableTensor"):
    ONLY_OURS.add("checkpointable")
"""What stock DCP of this version of torch cannot load, or changes."""


_MISMATCH = dcp.CheckpointMismatch, stock.CheckpointException
"""What stock raises has ours in it, as text."""


def _quiet() -> None:
    warnings.simplefilter("ignore")  # prototypes of torch, and stock that thinks nobody needs a process group


def _trusting(load: str) -> AbstractContextManager[Any]:
    """Stock readers need to be told of classes; ours knows those of the targets."""
    classes: list[Any] = [TwoTensor, _Scaled, _Named, AsyncCollectiveTensor]
    return torch.serialization.safe_globals(classes) if "stock reader" in load or load == "stock" else nullcontext()


@on_ranks(1)
def test_every_kind_comes_back_through_every_door(tmp_path: Path) -> None:
    _quiet()
    for save, load in itertools.product(SAVES, LOADS):
        by_stock = "stock" in save or "stock" in load
        kinds = {name: make for name, make in KINDS.items() if not (by_stock and name in ONLY_OURS)}
        if save in ("stock", "stock planner, our writer"):
            del kinds["collective"]  # stored as an object of a class that the target does not need
        path = tmp_path / save
        state = {"s": {name: make(1) for name, make in kinds.items()}}
        if not path.exists():
            SAVES[save](state, path)
            assert dcp.verify(path).ok
            assert {info.key for info in dcp.inspect(path).tensors} == {f"s.{name}" for name in kinds}
        found = {"s": {name: make(2) for name, make in kinds.items()}}
        known = set(torch.serialization.get_safe_globals())
        with _trusting(load):
            LOADS[load](found, path)
        assert set(torch.serialization.get_safe_globals()) == known
        _assert_same(found["s"], state["s"], f"{save} -> {load}")


@on_ranks(1)
def test_what_has_nothing_to_store_is_refused_by_name_with_the_way_out(tmp_path: Path) -> None:
    """Each by name, at every save and as a target; and all at once."""
    _quiet()
    dcp.save({"s": {"x": _numbers(1)}}, tmp_path / "good")
    for name, (make, reason) in REFUSED.items():
        for save in ("ours", "async", "lazy", "our planner, our writer"):
            with pytest.raises(_MISMATCH, match=reason) as said:
                SAVES[save]({"s": {"x": make(1)}}, tmp_path / "new")
            assert "s.x is" in str(said.value), name
            assert not (tmp_path / "new").exists()
        for load in ("ours", "our planner, our reader"):
            with pytest.raises(_MISMATCH) as said:
                LOADS[load]({"s": {"x": make(1)}}, tmp_path / "good")
            assert "s.x" in str(said.value), name
    with pytest.raises(dcp.CheckpointMismatch) as all_of_them:
        dcp.save({"s": {name: make(1) for name, (make, _) in REFUSED.items()}}, tmp_path / "new")
    assert all(f"s.{name} is" in str(all_of_them.value) for name in list(REFUSED)[:10])
    assert f"and {len(REFUSED) - 10} more" in str(all_of_them.value)


@on_ranks(1)
def test_our_writer_and_reader_do_not_trust_the_planner_of_somebody_else(tmp_path: Path) -> None:
    """Stock planners hand over what they have: our writer and reader look at it themselves."""
    _quiet()
    dcp.save({"x": _numbers(1)}, tmp_path / "good")
    for name in ("fake", "freed", "freed_in_part", "closed", "zero"):
        with pytest.raises(BaseException):  # noqa: B017, PT011 - some are refused by stock's own planner
            SAVES["stock planner, our writer"]({"x": REFUSED[name][0](1)}, tmp_path / "new")
        assert not (tmp_path / "new").exists(), name
        with pytest.raises(BaseException):  # noqa: B017, PT011
            LOADS["stock planner, our reader"]({"x": REFUSED[name][0](1)}, tmp_path / "good")


@on_ranks(1)
def test_a_tensor_of_a_class_is_only_loaded_into_one_of_that_class(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint"
    _quiet()
    saved = {"two": _two(1), "plain": _numbers(1), "wide": _numbers(1).double()}
    dcp.save({"s": saved}, directory)
    only = dcp.PartialLoad(include=["s.two"], cast=True)
    for target in ({"two": _numbers(2)}, {"two": _scaled(2)}):
        with pytest.raises(dcp.UnsafeCheckpoint, match=r"s\.two is stored as .*TwoTensor"):
            dcp.load({"s": target}, directory, partial=only)
    with torch.serialization.safe_globals([TwoTensor]):
        with pytest.raises(dcp.CheckpointMismatch, match=r"s\.two is stored as a TwoTensor and is a _Scaled here"):
            dcp.load({"s": {"two": _scaled(2)}}, directory, partial=only)
        with pytest.raises(dcp.CheckpointMismatch, match=r"s\.two is stored as a tensor subclass .*: have one there"):
            dcp.load({"s": {}}, directory)
        ours, its = {"s": {"two": _numbers(2)}}, {"s": {"two": _numbers(2)}}
        dcp.load(ours, directory, partial=only)
        stock.load(its, checkpoint_id=directory)
        _assert_same(ours["s"], its["s"], "what copy_ makes of it")
    with pytest.raises(dcp.CheckpointMismatch, match=r"s\.two has shape"):
        dcp.load({"s": {"two": _two(2, 2, 2)}}, directory)
    found = {"plain": _two(2), "wide": _two(2)}
    dcp.load({"s": found}, directory, partial=dcp.PartialLoad(include=["s.plain", "s.wide"], cast=True))
    _assert_same(found, {"plain": TwoTensor(_numbers(1), _numbers(1)), "wide": TwoTensor(_numbers(1), _numbers(1))}, "")
    with pytest.raises(dcp.CheckpointMismatch, match=r"s\.plain is a _Sealed that cannot take"):
        dcp.load(
            {"s": {"plain": KINDS["sealed"](1)}}, directory, partial=dcp.PartialLoad(include=["s.plain"], cast=True)
        )
    on_meta = {"plain": torch.empty(4, 6, device="meta"), "wide": torch.empty(4, 6, device="meta")}
    for load in ("ours", "our planner, our reader"):
        targets = {"s": dict(on_meta)}
        if load == "ours":
            dcp.load(targets, directory, partial=dcp.PartialLoad(include=["s.plain", "s.wide"], cast=True))
        else:
            LOADS[load](targets, directory)
        _assert_same(targets["s"], {"plain": saved["plain"], "wide": saved["wide"].float()}, load)
    with pytest.raises(dcp.CheckpointMismatch, match=r"s\.plain has several elements in the same memory"):
        dcp.load({"s": {"plain": torch.ones(1).expand(4, 6)}}, directory)


@on_ranks(1)
def test_a_flipped_bit_in_what_is_stored_whole_is_noticed(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint"
    _quiet()
    dcp.save({"s": {"two": _two(1)}}, directory)
    (file,) = directory.glob("*.distcp")
    flip_byte(file, file.read_bytes().index(_numbers(51).numpy().tobytes()))  # in the second part
    assert [line for line in dcp.verify(directory).errors if "s.two" in line]
    with pytest.raises(dcp.CheckpointCorrupt, match=r"s\.two"):
        dcp.load({"s": {"two": _two(2)}}, directory)


class _Model(nn.Module):
    """A quantized, frozen weight, tied twice; a trained wrapper; something plain; a wrapper as buffer."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.frozen = nn.Parameter(_two(at), requires_grad=False)
        self.again = self.frozen
        self.trained = nn.Parameter(_two(at + 1))
        self.plain = nn.Parameter(_numbers(at))
        self.register_buffer("scaled", _scaled(at))


def _trained(at: int) -> tuple[_Model, torch.optim.Optimizer]:
    model = _Model(at)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1 * at)
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter) * at
    optimizer.step()
    return model, optimizer


def _flat(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    slots = {f"{at}.{slot}": value for at, s in enumerate(optimizer.state.values()) for slot, value in s.items()}
    return {**model.state_dict(), **slots}


@on_ranks(1)
def test_models_and_optimizers_with_such_tensors_at_every_staging(tmp_path: Path) -> None:
    _quiet()
    model, optimizer = _trained(1)
    wanted = {key: _content(value) for key, value in _flat(model, optimizer).items()}
    for staging in ("", "blocking", "lazy"):
        checkpointer = dcp.Checkpointer(async_save=bool(staging), staging=staging or "blocking")
        for number in range(3):  # the third links what has not changed
            path = tmp_path / f"{staging}{number}"
            checkpointer.save({"model": model, "optim": optimizer}, path).wait()
        if staging:
            values = [*model.parameters(), *(value for slots in optimizer.state.values() for value in slots.values())]
            parts = [part for v in values for part in ((v.a, v.b) if isinstance(v, TwoTensor) else (v,))]
            before = [part.detach().clone() for part in parts]
            later = checkpointer.save({"model": model, "optim": optimizer}, tmp_path / f"{staging}later")
            later.wait_staged()
            with torch.no_grad():  # the copy shares nothing
                for part in parts:
                    part.zero_()
                later.wait()
                for part, old in zip(parts, before, strict=True):
                    part.copy_(old)
        checkpointer.close()
        for path in tmp_path.glob(f"{staging or '[0-9]'}*"):
            other, others = _trained(2)
            dcp.load({"model": other, "optim": others}, path)
            found = _flat(other, others)
            wrong = [key for key in wanted if _differ(_content(found[key]), wanted[key])]
            assert not wrong, (path.name, wrong)
            assert other.frozen is other.again and dcp.verify(path).ok
    quantized = torch.optim.SGD(other.parameters(), momentum=0.9)
    quantized.state[other.plain]["momentum_buffer"] = _scaled(1)
    dcp.save({"model": other, "optim": quantized}, tmp_path / "slots")
    quantized.state.clear()
    with pytest.raises(dcp.CheckpointMismatch, match=r"plain\.momentum_buffer is stored as .* take one step"):
        dcp.load({"model": other, "optim": quantized}, tmp_path / "slots")
    fresh = _Model(3)
    unstepped = torch.optim.AdamW([p for p in fresh.parameters() if p.requires_grad], lr=9)
    dcp.load({"model": fresh, "optim": unstepped}, tmp_path / "0")
    found = _flat(fresh, unstepped)
    assert not [key for key in wanted if _differ(_content(found[key]), wanted[key])]


def _rows_of(tensor: torch.Tensor, parts: int) -> torch.Tensor:
    return tensor.chunk(parts)[dist.get_rank()]


def _distributed(at: int, rank: int) -> dict[str, Any]:
    """Sharded tensors of all kinds, of two ranks."""
    mesh = init_device_mesh("cpu", (2,))
    whole, odd = _numbers(at, 8, 6), _numbers(at, 5, 6)
    made: dict[str, Any] = {
        f"plain_{dim}_{len(one)}": distribute_tensor(one, mesh, [Shard(dim)]) for one in (whole, odd) for dim in (0, 1)
    }
    made["replicated"] = distribute_tensor(whole, mesh, [Replicate()])
    two = TwoTensor(_rows_of(whole, 2).clone(), _rows_of(whole + 1, 2).clone())
    made["two"] = DTensor.from_local(two, mesh, [Shard(0)], run_check=False)
    made["two_as_parameter"] = nn.Parameter(DTensor.from_local(two + 1, mesh, [Shard(0)], run_check=False))
    made["two_replicated"] = DTensor.from_local(_two(at), mesh, [Replicate()], run_check=False)
    sealed = _Sealed(_rows_of(whole, 2).to(torch.int8), _numbers(at, 4), 8)
    made["sealed"] = DTensor.from_local(sealed, mesh, [Shard(0)], run_check=False)
    pending = AsyncCollectiveTensor(_rows_of(whole, 2).clone())
    made["pending"] = DTensor.from_local(pending, mesh, [Shard(0)], run_check=False)
    columns = [whole[:, :1], whole[:, 4:]] if rank == 0 else [whole[:, 1:4]]
    places = [(0, 0), (0, 4)] if rank == 0 else [(0, 1)]
    shards = LocalShardsWrapper([one.clone().bfloat16() for one in columns], places)
    made["shards"] = DTensor.from_local(shards, mesh, [Shard(1)], run_check=False, shape=(8, 6), stride=(6, 1))
    here = LocalShardsWrapper([whole.clone().double()], [(0, 0)]) if rank == 1 else LocalShardsWrapper([], [])
    made["on_one_rank"] = DTensor.from_local(here, mesh, [Shard(0)], run_check=False, shape=(8, 6), stride=(6, 1))
    padded = torch.full((6, 8), float(at))
    padded[1:5, 2:] = _rows_of(whole, 2)
    fields = (8, 6), ((4 * rank, 0), (4 * rank + 1, 0)), ((1, 2), (2, 2)), ((1, 6), (3, 6))
    made["checkpointable"] = _checkpointable(padded, *fields)
    made["checkpointable_parameter"] = _checkpointable(nn.Parameter(padded + 1), *fields)
    return made


STOCK_CANNOT_LOAD = {"sealed"}
if not hasattr(stock, "CheckpointableTensor"):
    STOCK_CANNOT_LOAD |= {"checkpointable", "checkpointable_parameter"}


class _Rows(nn.Module):
    """This rank's rows of a weight, behind a row of padding."""

    def __init__(self, at: int) -> None:
        super().__init__()
        rank = dist.get_rank()
        local = torch.cat((torch.full((1, 6), -1.0), _rows_of(_numbers(at, 8, 6), 2)))
        self.weight = _checkpointable(nn.Parameter(local), (8, 6), ((4 * rank, 0),), ((1, 0),), ((4, 6),))


def _rows_trained(at: int) -> tuple[_Rows, torch.optim.Optimizer]:
    model = _Rows(at)
    optimizer = torch.optim.AdamW(model.parameters())
    model.weight.grad = model.weight.detach() * at
    optimizer.step()
    return model, optimizer


@on_ranks(4)
def test_shards_of_fsdp_over_tensor_parallelism(tmp_path: Path) -> None:
    """As FSDP2 over tensor parallelism has it."""
    directory = tmp_path / "checkpoint"
    _quiet()
    mesh = init_device_mesh("cpu", (2, 2))
    whole = _numbers(1, 8, 6)
    made = distribute_tensor(whole, mesh, [_StridedShard(0, split_factor=2), Shard(0)])
    two = TwoTensor(made.to_local().clone(), made.to_local() + 1)
    both = DTensor.from_local(two, mesh, made.placements, run_check=False, shape=(8, 6), stride=(6, 1))
    dcp.save({"s": {"x": made, "two": both}}, directory)
    found: dict[str, Any] = {"x": torch.zeros(8, 6)}
    dcp.load({"s": found}, directory, partial=dcp.PartialLoad(include=["s.x"]))
    assert same_bytes(found["x"], whole)
    parts = [_numbers(5, 4, 6) for _ in range(2)]
    rows = DTensor.from_local(TwoTensor(*parts), mesh, [Replicate(), Shard(0)], run_check=False)
    dcp.load({"s": {"two": rows}}, directory, partial=dcp.PartialLoad(include=["s.two"]))
    mine = whole.chunk(2)[mesh.get_local_rank(1)]
    assert same_bytes(parts[0], mine) and same_bytes(parts[1], mine + 1)


@on_ranks(2)
def test_a_module_of_local_rows_and_its_optimizer_are_saved_and_loaded_whole(tmp_path: Path) -> None:
    _quiet()
    rank = dist.get_rank()
    model, optimizer = _rows_trained(1)
    slots = optimizer.state[model.weight]
    for staging in ("blocking", "lazy"):
        _save_async({"model": model, "optim": optimizer}, tmp_path / staging, staging)
        (other, stepped), fresh = _rows_trained(2), _Rows(3)
        unstepped = torch.optim.AdamW(fresh.parameters())
        for target, its in ((other, stepped), (fresh, unstepped)):
            before = target.weight.detach()[0].clone()
            dcp.load({"model": target, "optim": its}, tmp_path / staging)
            assert same_bytes(target.weight.detach()[1:], model.weight.detach()[1:])
            assert same_bytes(target.weight.detach()[0], before), "padding is nobody's"
            assert same_bytes(its.state[target.weight]["exp_avg"][1:], slots["exp_avg"][1:])
    whole = {"model": {"weight": torch.zeros(8, 6)}}
    stock.load(whole, checkpoint_id=tmp_path / "lazy")
    assert same_bytes(whole["model"]["weight"][4 * rank : 4 * rank + 4], model.weight.detach()[1:])


@on_ranks(2)
def test_sharded_kinds_come_back_through_every_door(tmp_path: Path) -> None:
    _quiet()
    rank = dist.get_rank()
    for save, load in itertools.product(SAVES, LOADS):
        by_stock = "stock" in save or "stock" in load
        state = {k: v for k, v in _distributed(1, rank).items() if not (by_stock and k in STOCK_CANNOT_LOAD)}
        if save in ("stock", "stock planner, our writer"):
            del state["pending"]
        path = tmp_path / save
        if not path.exists():
            dist.barrier()
            SAVES[save]({"s": state}, path)
        dist.barrier()
        found = {"s": {key: value for key, value in _distributed(2, rank).items() if key in state}}
        with _trusting(load):
            LOADS[load](found, path)
        _assert_same(found["s"], state, f"{save} -> {load}, rank {rank}")
        dist.barrier()


@on_ranks(2)
def test_sharded_kinds_are_loaded_into_other_layouts(tmp_path: Path) -> None:
    _quiet()
    rank, path = dist.get_rank(), tmp_path / "checkpoint"
    dcp.save({"s": _distributed(1, rank)}, path)
    mesh = init_device_mesh("cpu", (2,))
    whole = _numbers(1, 8, 6)
    found: dict[str, Any] = {
        "two": DTensor.from_local(_two(5, 8, 3), mesh, [Shard(1)], run_check=False),
        "two_replicated": DTensor.from_local(_two(5, 2, 6), mesh, [Shard(0)], run_check=False),
        "checkpointable": torch.zeros(8, 6),
        "checkpointable_parameter": distribute_tensor(torch.zeros(8, 6), mesh, [Shard(1)]),
        "shards": torch.zeros(8, 6, dtype=torch.bfloat16),
        "on_one_rank": torch.zeros(8, 6, dtype=torch.float64),
        "plain_0_8": _checkpointable(torch.zeros(4, 6), (8, 6), ((4 * rank, 0),), ((0, 0),), ((4, 6),)),
    }
    wanted: dict[str, Any] = {
        "two": TwoTensor(*(one[:, 3 * rank : 3 * rank + 3] for one in (whole, whole + 1))),
        "two_replicated": TwoTensor(*(one[2 * rank : 2 * rank + 2] for one in (_two(1).a, _two(1).b))),
        "checkpointable": whole,
        "checkpointable_parameter": (whole + 1)[:, 3 * rank : 3 * rank + 3],
        "shards": whole.bfloat16(),
        "on_one_rank": whole.double(),
        "plain_0_8": found["plain_0_8"],
    }
    dcp.load({"s": found}, path, partial=dcp.PartialLoad(include=[f"s.{key}" for key in found]))
    _assert_same(found, wanted, f"resharded, rank {rank}")
    assert torch.equal(found["plain_0_8"], whole[4 * rank : 4 * rank + 4])
    columns = _Sealed(_numbers(1, 8, 3, dtype=torch.int8), _numbers(1, 4), 8)
    for key, target, reason in (
        ("sealed", DTensor.from_local(columns, mesh, [Shard(1)], run_check=False), "no part can be taken"),
        ("plain_0_8", DTensor.from_local(torch.zeros(8, 6), mesh, [Partial()], run_check=False), "summand"),
        ("plain_0_8", distribute_tensor(whole, mesh, [_StridedShard(0, split_factor=2)]), "several boxes"),
    ):
        with pytest.raises(dcp.CheckpointMismatch, match=rf"s\.{key} is .*{reason}"):
            dcp.load({"s": {key: target}}, path, partial=dcp.PartialLoad(include=[f"s.{key}"]))
    partial = DTensor.from_local(torch.ones(4), mesh, [Partial()], run_check=False)
    bad = {"x": partial, "y": _Closed(_numbers(1)) if rank == 1 else _numbers(1)}
    with pytest.raises(dcp.CheckpointMismatch, match=r"s\.y is a _Closed") as said:
        dcp.save({"s": bad}, path.parent / "bad")
    assert "s.x is a DTensor with the placements" in str(said.value) and not (path.parent / "bad").exists()
