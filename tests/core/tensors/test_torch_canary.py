"""Fails loudly when a private name of torch that we depend on moves or changes its meaning."""

from __future__ import annotations

import functools
import inspect
import io
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

import dcp_plugin as dcp
from dcp_plugin.core.format.pickles.unpickler import FILE, load
from dcp_plugin.core.format.torch_archive import Archive
from dcp_plugin.core.state.fsdp1 import gather_module
from dcp_plugin.core.state.module import same_flat_parameter
from dcp_plugin.core.state.names import parameter_names
from dcp_plugin.core.tensors import _torch, _torch_modules, _torch_sharded, kinds
from tests.compare import full, same_bytes
from tests.launch import on_ranks


def test_storage_info_has_the_fields_that_stock_readers_use() -> None:
    info = _StorageInfo("file", 1, 2)
    assert (info.relative_path, info.offset, info.length, info.transform_descriptors) == ("file", 1, 2, None)


def test_save_takes_its_writer_as_an_argument_and_never_needs_the_payload() -> None:
    names = list(inspect.signature(torch.serialization._save).parameters)
    assert names == ["obj", "zip_file", "pickle_module", "pickle_protocol", "_disable_byteorder_record"]
    records, _ = _torch.pickled_parts(torch.empty(2, 3, dtype=torch.bfloat16))
    assert list(records) == ["data.pkl", ".format_version", ".storage_alignment", "byteorder"]
    buffer = io.BytesIO()
    torch.save(torch.empty(2, 3, dtype=torch.bfloat16), buffer)
    for data in records.values():
        assert data in buffer.getvalue()


def test_python_2_names_are_translated() -> None:
    assert _torch.name_of_today("__builtin__", "set") == ("builtins", "set")


def test_a_device_in_a_pickle_gives_way_to_the_device_of_the_load() -> None:
    with _torch.rebuilding_on("meta"):
        rebuilt = torch._utils._rebuild_device_tensor_from_cpu_tensor(torch.ones(1), torch.float64, "cpu", False)
    assert rebuilt.is_meta and torch.serialization._serialization_tls.map_location is None


def test_the_record_of_a_storage_is_noted_as_torch_notes_it(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(100.0), "b": torch.arange(7, dtype=torch.int16)[2:]}, tmp_path / "file")
    data = (tmp_path / "file").read_bytes()
    with (tmp_path / "file").open("rb") as file:
        tensors, _ = load(Archive(file, len(data)), FILE, ())
    theirs = torch.load(tmp_path / "file", map_location="meta")
    for name, tensor in tensors.items():
        assert _torch.record_offset(tensor) == _torch.record_offset(theirs[name])
        begin = _torch.record_offset(tensor)
        assert tensor.is_meta and begin is not None
        expected = torch.arange(tensor.untyped_storage().nbytes() // tensor.itemsize, dtype=tensor.dtype)
        assert data[begin : begin + expected.nbytes] == expected.numpy().tobytes()


@on_ranks(2)
def test_names_of_our_collectives_are_short_enough_for_gloo(tmp_path: Path) -> None:
    """Gloo frees the name of an operation twice if it has more than 15 characters."""
    called: set[str] = set()

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "c10d":
                called.add(func._schema.name.removeprefix("c10d::").rstrip("_"))
            return func(*args, **(kwargs or {}))

    model = torch.nn.Linear(200, 200)
    with Names():
        dcp.save({"model": model, "n": 1}, tmp_path / "ck")
        dcp.load({"model": model, "n": 0}, tmp_path / "ck")
    assert "broadcast" in called and max(map(len, called)) <= 15, called


def test_a_module_keeps_its_own_parameters_and_buffers_where_we_look() -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3, bias=False))
    for child in model.modules():
        assert list(_torch_modules.own_parameters(child)) == list(child.named_parameters(recurse=False))
    assert list(map(id, _torch_modules.parameters_in(model.modules()))) == list(map(id, model.parameters()))
    assert list(map(id, _torch_modules.buffers_in(model.modules()))) == list(map(id, model.buffers()))


def test_a_hook_of_several_modules_runs_before_a_load_into_each_until_its_handle_removes_it() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    called: list[object] = []
    hooks = list(map(_torch_modules.pre_load_hooks, model))
    handle = RemovableHandle(hooks[0], extra_dict=hooks[1:])
    for of_module in hooks:
        of_module[handle.id] = lambda *args: called.append(args[1])
    model.load_state_dict(model.state_dict())
    assert called == ["0.", "1."]
    handle.remove()
    model[0].load_state_dict(model[1].state_dict())
    assert len(called) == 2


def test_modules_and_parameters_of_a_union_are_found_under_any_name() -> None:
    layer, scale = torch.nn.Linear(2, 2, bias=False), torch.nn.Parameter(torch.ones(()))
    union = _torch_modules.union_of({"train": layer, "a.b": layer}, {"loose.0.1": scale})
    named = dict(union.named_parameters(remove_duplicate=False))
    assert list(named) == ["loose.0.1", "train.weight", "a.b.weight"]
    assert named["loose.0.1"] is scale


def test_names_of_pruned_and_parametrized_parameters_are_found() -> None:
    from torch.nn.utils import parametrizations, prune

    layer, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    assert _torch_modules.reparametrized(layer) == {}
    prune.l1_unstructured(layer, "weight", 0.5)
    prune.random_unstructured(layer, "weight", 0.5)  # torch joins the two in a container
    parametrizations.orthogonal(other, "weight")
    named = {0: {"weight_orig": "weight"}, 1: {"parametrizations.weight.original": "weight"}}
    for number, module in enumerate((layer, other)):
        assert _torch_modules.reparametrized(module) == named[number]
        assert named[number].keys() <= dict(module.named_parameters()).keys()


def test_optimizers_of_torch_have_no_state_dict_of_their_own_and_hooks_are_found() -> None:
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    kinds = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]
    kinds = [kind for kind in kinds if issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer]
    assert len(kinds) > 10
    assert not [kind for kind in kinds if _torch_modules.has_own_state_dict(kind([parameter], lr=0.1))]
    registering = [name for name in dir(torch.optim.Optimizer) if name.startswith("register_") and "state" in name]
    assert len(registering) == 4
    for register in registering:
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        getattr(optimizer, register)(lambda *_: None)
        assert _torch_modules.has_own_state_dict(optimizer)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state_dict = dict  # type: ignore[method-assign,assignment]
    assert _torch_modules.has_own_state_dict(optimizer)


@on_ranks(2)
def test_a_flat_parameter_knows_its_tied_weights() -> None:
    tied = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    model = FullyShardedDataParallel(tied, device_id=torch.device("cpu"), use_orig_params=False)
    assert same_flat_parameter(model) == {"1.weight": "0.weight"}


@on_ranks(3, 4)
def test_dtensor_tells_where_its_shard_is(world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    value = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])
    chunks = [(chunk.offsets, chunk.sizes) for chunk in _torch.sharded_value(value).chunks]
    assert chunks == [[((0,), (2,))], [((2,), (2,))], [((4,), (1,))], []][dist.get_rank()]
    with torch.no_grad():
        assert value._local_tensor is value.to_local()


@on_ranks(2)
def test_fsdp1_names_its_flat_parameters_and_its_shards_can_be_rebuilt() -> None:
    model = FullyShardedDataParallel(torch.nn.Linear(3, 5), device_id=torch.device("cpu"), use_orig_params=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = parameter_names(model)
    assert [names[id(p)] for p in optimizer.param_groups[0]["params"]] == [["weight", "bias"]]
    value = gather_module(model)["weight"]
    made = _torch.empty_like(value, torch.float64)
    for new, old in zip(made.local_shards(), value.local_shards(), strict=True):
        new.tensor.copy_(old.tensor)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert same_bytes(full(made), full(value).double())


def test_torch_has_no_address_for_what_has_no_memory() -> None:
    """What keeps us from reading there, at any offset; and an offset is why the tensor's own address says nothing."""
    inner = torch.zeros(9)[3:]
    tensor = TwoTensor(inner, inner)
    assert tensor.data_ptr() == 3 * tensor.itemsize
    with pytest.raises(RuntimeError, match="invalid python storage"):
        tensor.untyped_storage().data_ptr()
    assert torch.empty(3, device="meta").untyped_storage().data_ptr() == 0


def test_a_collective_that_is_under_way_is_waited_for() -> None:
    pending = AsyncCollectiveTensor(torch.arange(3.0))
    result = _torch_sharded.settled(pending)
    assert type(result) is torch.Tensor and torch.equal(result, torch.arange(3.0))


def test_tensors_with_the_protocol_of_dcp_tell_their_chunks() -> None:
    parts = [torch.zeros(2, 1), torch.ones(2, 2)]
    value = _torch.sharded_value(LocalShardsWrapper(parts, [(0, 0), (0, 1)]))
    assert [(chunk.offsets, chunk.sizes) for chunk in value.chunks] == [((0, 0), (2, 1)), ((0, 1), (2, 2))]
    assert [chunk.tensor.data_ptr() for chunk in value.chunks] == [part.data_ptr() for part in parts]
    fields = getattr(torch.distributed.checkpoint, "CheckpointableTensor", None)  # from torch 2.14 on
    assert fields is None or set(fields.__annotations__) == set(kinds.CHECKPOINTABLE)


def test_to_leave_safe_globals_forgets_what_was_known_before() -> None:
    """Why we do not name again what the user has named."""
    with torch.serialization.safe_globals([TwoTensor]):
        with torch.serialization.safe_globals([TwoTensor]):
            pass
        assert TwoTensor not in torch.serialization.get_safe_globals()


def test_torch_tells_how_to_undo_its_stream_transforms() -> None:
    (transform,) = _torch.transforms_of(["stream.zstd/1"])
    packed = io.BytesIO()
    with transform.transform_to(packed) as stream:
        stream.write(b"some bytes")
        stream.flush()
        data = packed.getvalue()
    assert _torch.undo_transforms(data, ["stream.zstd/1"], 4) == b"some"
    with pytest.raises(ValueError, match=r"stream\.unheard"):
        _torch.transforms_of(["stream.unheard/1"])


@on_ranks(2)
def test_hooks_of_fsdp2_and_of_normalisations_need_no_state_dict() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    fully_shard(model)
    model(torch.ones(2, 3))  # with the first forward come the hooks
    assert any(child._load_state_dict_pre_hooks for child in model), "then reshard() is not what state_dict() does"
    assert not any(map(_torch_modules.takes_state_dict, model.modules()))
    called: list[object] = []
    for child in model.modules():
        for key, hook in list(child._load_state_dict_post_hooks.items()):
            noted = functools.wraps(hook)(lambda *args: called.append(args))
            child._load_state_dict_post_hooks[key] = noted
        _torch_modules.call_post_load_hooks(child, _torch_modules.Incompatible(), of_torch_too=False)
    assert not called
    _torch_modules.call_post_load_hooks(model[0], _torch_modules.Incompatible(), of_torch_too=True)
    assert called


def test_activation_checkpointing_needs_no_state_dict_and_other_hooks_do() -> None:
    wrapped = checkpoint_wrapper(torch.nn.Linear(2, 2))
    assert wrapped._load_state_dict_pre_hooks
    assert not _torch_modules.takes_state_dict(wrapped)
    for register in ("register_load_state_dict_pre_hook", "_register_load_state_dict_pre_hook"):
        module = torch.nn.Linear(2, 2)
        getattr(module, register)(lambda *args: None)
        assert _torch_modules.takes_state_dict(module)
    assert _torch_modules.takes_state_dict(torch.ao.quantization.MinMaxObserver())
    assert _torch_modules.takes_state_dict(torch.nn.LazyLinear(2))
    assert not _torch_modules.takes_state_dict(torch.nn.InstanceNorm1d(3))


def test_a_module_is_loaded_by_the_steps_of_load_state_dict() -> None:
    """:func:`dcp_plugin.core.state.module_load` goes through a module as torch does."""
    source = inspect.getsource(torch.nn.Module.load_state_dict)
    steps = [
        "module._load_from_state_dict(",
        "module._modules.items()",
        "k.startswith(child_prefix)",
        "module._load_state_dict_post_hooks.values()",
        "_IncompatibleKeys(missing_keys, unexpected_keys)",
    ]
    places = [source.find(step) for step in steps]
    assert -1 not in places
    assert places[:3] == sorted(places[:3])
    assert places[2] < places[3]


def test_python_runs_work_at_the_end_of_a_program_before_it_stops_thread_pools() -> None:
    assert callable(getattr(threading, "_register_atexit", None)), "background saves that nobody waits for would fail"


@on_ranks(1)
def test_a_process_group_tells_on_which_device_it_communicates() -> None:
    assert str(_torch._get_object_coll_device()) == "cpu"
    assert str(_torch.with_memory(torch.empty(2, device="meta")).device) == "cpu"


@on_ranks(2)
def test_the_ranks_of_a_process_group_share_its_store() -> None:
    store = _torch.default_store()
    if dist.get_rank() == 1:
        store.compare_set("canary", "", "of rank 1")
    assert store.get("canary") == b"of rank 1"
