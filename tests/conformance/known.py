"""Differences that are being mended: delete a line when its mend has landed. The tests are strict: they fail if it has.

Patterns of the names of cases, by what is to be mended.
"""

from __future__ import annotations

from fnmatch import fnmatch

UNSHARDED_ROOT = "(1) FSDP2: the root is unsharded after a forward without a backward"
LOAD_BYPASSED = "(3) overrides and hooks of load_state_dict are not called, or not with the whole state dict"
RESIZING = "(5) buffers and parameters that resize themselves, or appear, while they are loaded"
WRAPPERS = "(6) wrapper subclasses and quantised tensors"
SHARDS_WRAPPER = "(7) LocalShardsWrapper"
NESTED_SHARDS = "(10) a module's own nested state dict with sharded tensors"
CALLED_TWICE = "(11) state_dict is called twice during a load"

KNOWN: dict[str, tuple[str, ...]] = {
    UNSHARDED_ROOT: (
        *(
            f"moments/{layout}-{moment}"
            for layout in ("fsdp2", "fsdp2_keep")
            for moment in (
                "first_forward_only", "evaluated", "evaluated_first", "into_evaluated", "into_trained_and_evaluated",
                "inferred", "into_inferred", "in_eval_mode", "after_forward", "failed_in_backward",
                "into_failed_in_backward",
            )
        ),
        "moments/fsdp2*-failed_in_forward", "moments/fsdp2*-into_failed_in_forward",
        "moments/fsdp2*-unsharded_by_hand", "moments/fsdp2*-into_unsharded_by_hand",
    ),
    LOAD_BYPASSED: (
        "modules/*-StateDictHookAdds*", "modules/*-StateDictHookRemovesKeys", "modules/*-StateDictHookRenames",
        "modules/*-LoadPreHook*", "modules/*-LoadPostHook*", "modules/*-LoadFromStateDict", "modules/*-VersionedModule",
        "modules/plain-OverriddenStateDict", "modules/fsdp2-OverriddenStateDict",
        "modules/plain-OverriddenLoad*", "modules/fsdp2-OverriddenLoadSetsState",
        "modules/fsdp2-OverriddenLoadChangesValues", "modules/fsdp2-OverriddenLoadAssigns",
        "modules/*-OverriddenWithoutOptions", "modules/*-HookRaisesOnLoad", "modules/*-CachedInverse",
        "modules/*-EmaByHand", "modules/*-QuantizedDynamically",
    ),
    RESIZING: (
        "modules/*ResizesItself", "modules/*-BufferRegisteredAtLoad", "modules/*-LazyUnused", "modules/*-OldNames",
    ),
    WRAPPERS: (
        "modules/*OfTwoTensors", "modules/*-Quantized*Buffer", "tensors/*-quantized", "tensors/*-two_tensors",
        "tensors/*-dtensor_of_two_tensors", "tensors/*-not_yet_arrived",
    ),
    SHARDS_WRAPPER: ("tensors/*-dtensor_of_local_shards", "tensors/*-rows_of_local_shards"),
    NESTED_SHARDS: ("modules/fsdp2-OverriddenNested",),
    CALLED_TWICE: (
        *(
            f"modules/*-ExtraState_{kind}"
            for kind in (
                "int", "float", "bool", "str", "bytes", "None*", "list*", "empty_*", "tuple*", "set", "dict",
                "dict_with_int_keys", "nested_dict", "dict_that_grows", "tensor", "scalar_tensor", "dict_of_tensors",
                "ordered_dict",
            )
        ), "modules/*-SaveToStateDict", "modules/*-SyncedMetric",
    ),
}  # fmt: skip


def known_failure(name: str) -> str:
    """What has to be mended for this case; empty if nothing has to be."""
    return next((item for item, patterns in KNOWN.items() if any(fnmatch(name, each) for each in patterns)), "")
