"""The reasons for our differences, by the title under which ``docs/differences.md`` has them."""

from __future__ import annotations

NO_STEP = """\
`get_state_dict` of torch lets an optimizer without state take a step with gradients of zero, at a save and at a load.
This changes the training: Adam's `step` stays 1 too high. We save the existing state only."""

RESTORES_STATE = """\
If a parameter has a gradient, `set_state_dict` of torch does not load the state of an optimizer without state, and the
training continues with moments of zero. We restore the state."""

FINDS_UNSHARDED = """\
After a forward without a backward the root of an FSDP2 model stays unsharded. `get_state_dict` of torch then omits its
optimizer state without an error. We save and restore it."""

EXACT_SLOTS = """\
`Optimizer.load_state_dict` casts tensors, except `step`, to the dtype of the parameter, and replaces strings by the
text of a generator. We restore the dtype, the type and the value that were saved."""

EXTRA_KEYS = """\
`set_state_dict` of torch hands over `state` and `param_groups` only, so counters and slow weights of an optimizer are
lost. We restore them. An optimizer whose `state_dict` has another layout is saved as stock saves a `Stateful`."""

ANOTHER_CLASS = """\
A checkpoint may have the state of another class of optimizers. If that state lacks slots or fields that the optimizer
needs, `strict=True` raises `CheckpointMismatch` before it changes anything. Stock raises at the first missing key, or
at the first step. A sufficient state, as AdamW's for Adam, loads with a warning."""

EXACT_KEYS = """\
If an extra state is a dict, stock reads only the keys that the target has. Other keys are lost, and integer keys
become strings. We restore the value that was saved."""

GROWS = """\
Stock reads the keys of the target. We restore the plain values of the checkpoint, also new keys of a dict and of a
`Stateful`. Tensors follow the target, as in stock."""

HANDS_OVER = """\
Stock does not read tensors that the target lacks. A `Stateful` also gets the tensors that no rank's target has, so
that its own `load_state_dict` can refuse half a model. `strict=False` and `unexpected="ignore"` do as stock does."""

FILLS_EMPTY = """\
Stock reads nothing into an empty mapping, or into a None in the place of a mapping. Both receive everything below
their key: `{"optim": optimizer.state_dict()}` of a new optimizer gets the saved state."""

ONE_ORDER = """\
Stock calls the objects of a state in the order of the mapping at a save, and sorted by name at a load; its
`set_state_dict` calls an optimizer before its module. We call modules, then optimizers, then the others, each sorted
by name, in both. Ranks whose mappings have another order therefore do not wait for each other."""

CUTS_NOTHING = """\
Stock copies floating-point numbers into a tensor of integers and loses their fractions. We raise `CheckpointMismatch`
before anything is overwritten. Both convert between floating-point dtypes."""

REPLACES = """\
Stock raises if the target has a plain value in the place of a tensor or a mapping. We replace the value."""

UNKNOWN_URL = """\
A path such as `nosuch://bucket/run` is a `ValueError` that names the known kinds. Stock raises `RuntimeError: Cannot
detect which StorageReader or StorageWriter to use`."""

OWN_PER_RANK = """\
Stock stores the value of one rank under a key, and all ranks continue with the random state and the data of that rank.
Loaders and samplers of torchdata keep one position for each rank, under `<name>.<rank>`, and so does a value in
`PerRank`. Any other value is that of the first rank; the first save warns if ranks differ, except in numbers,
one-element tensors and lists of floats, and in the state of modules and optimizers."""

STRICT = """\
Stock ignores keys that the model lacks. With `strict=True`, the default, we raise `CheckpointMismatch`, because such a
key is often a mistake. `strict=False` does as stock does. A key of another rank's model is no error."""

OWN_ERRORS = """\
An exception of a user's hook is raised on all ranks: as `SaveFailed` in a save, as `CheckpointError` in a load on
several ranks, with its class and message. Stock raises it on one rank, and the others wait."""

STOCK_ERRORS = """\
Our errors are `CheckpointError`s, which are `Exception`s. Stock's `CheckpointException` derives from `BaseException`,
so `except Exception` does not catch it."""

OTHER_WORDS = """\
Stock reports `Missing key in checkpoint state_dict` and `Size mismatch`. Our `CheckpointMismatch` names all keys with
both shapes, and the option that loads the rest."""

WORKSPACE_STAYS = """\
The folder of checkpoints has one more entry, `.dcp_plugin`, for saves in flight and for `saves.figures`. A script that
lists the folder has to ignore it. With Accelerate's automatic names it is in the project's folder."""

OWN_FOLDER = """\
Our writer refuses a directory with other files, because retention could delete them. Stock writes between them. So
`torch_save_to_dcp("run/model.pt", "run")` needs another target, such as `"run/step-1"`."""

FLAT_KEYS = """\
Keys of an optimizer are `state.<FQN>.<slot>`. torch's private `_load_state_dict_from_keys("optimizer")` returns these
names, and `"optimizer.state"` selects none of them."""

IN_PLACE = """\
Stock assigns a nested mapping to its key again, which calls the `__setitem__` of a user's class. We do not."""

EPOCHS = """\
If a checkpoint was saved between two epochs, Lightning resumes it with errors: one batch too many with `max_steps`, a
skipped epoch after a save at the last batch with a stateful dataloader or in `on_train_epoch_start`, and shuffling
that starts over. We begin the next epoch as in a run without interruption."""

SEES_THE_MODEL = """\
Lightning reads a file and calls `load_state_dict`. We read into the model and the optimizer, as DCP does, and call
their `state_dict` for that."""

RESOLVES_NOTHING = """\
A load keeps an interpolation in a `DictConfig` among the hyper-parameters. Stock's `load_from_checkpoint` resolves
those at the top level, which calls resolvers with values of the checkpoint. `on_load_checkpoint` gets a plain dict,
and structured configs lose their class."""

NO_CODE = """\
A load restores [these values](reference/format.md#values) without a call of their constructors. Values of a class that
is not imported become plain, with a warning. All others cannot be saved, unless `allow_pickle` names them."""

ADAPTERS = """\
A PEFT model's checkpoint has no `adapter_model.safetensors` under FSDP1, and none for prompt learning under FSDP,
because PEFT hangs there. The adapters are in the checkpoint."""

NO_SECOND_MODEL = """\
A checkpoint has no `model.safetensors` and no `optimizer.pt`, so `Model.from_pretrained("out/checkpoint-N")` finds no
weights. `dcp_plugin.load({"model": model}, "out/checkpoint-N")` loads them. A Trainer that overrides `save_model` or
`_save` writes its own files too.

The Trainer alone cannot resume from such a checkpoint and raises. If it finds weights there (adapters, or those of
your own `save_model`), a `scheduler.pt` and a folder `optimizer` make it raise instead of starting with a new
optimizer.

Of 30 tests of transformers' own about checkpoints and callbacks, 19 pass as they are, and nine more with a reader in
the place of `model.safetensors`."""

NO_OBJECTS = """\
Modules, functions and classes among the hyper-parameters are left out, with a warning. Pass them to
`load_from_checkpoint`. Hooks get `checkpoint["state_dict"]` without torch's `_metadata`, and `storage_options` is a
`TypeError`."""

HOOKS_ADD_VALUES = """\
Lightning pickles a module, metric or optimizer that `on_save_checkpoint` adds. We raise `UnsafeCheckpoint` at the
first save on every rank. With `allow_pickle=("extra.loss",)` it is pickled as in Lightning."""

A_DIRECTORY = """\
`torch.load`, `os.path.isfile` and `Model.load_from_checkpoint` find no file. `DCPCheckpointIO().load_checkpoint(path)`
and `dcp_plugin.lightning.load_from_checkpoint` read the directory. A resume without a checkpoint raises
`CheckpointNotFound`, a `FileNotFoundError`. Values that a test's mock puts into a checkpoint cannot be saved."""

LISTS = """\
`list_checkpoints`, `prune`, `keep_last` and the command `list` know DCP directories only, so no deletion from such a
list touches files of another tool. `latest` and automatic resumes find those too."""

MAPS_TO_CPU = """\
`load_state` without `map_location` loads Accelerate's own files to the CPU first. With several GPUs, Accelerate loads
them to the device, where they take the memory twice for that time."""

NOT_AT_ITS_PATH = """\
A save that `durable_every` leaves out is in `local_dir` only. Lightning's `last` links to published checkpoints; at
the end of `fit` the newest is published, then links and deletions follow. `save_total_limit` and `total_limit` count
published checkpoints, `local_keep` limits the others. A best checkpoint (`monitor`, `metric_for_best_model`) is always
published. `wait` and `close` raise a failed publication; the next save does not."""

LAZY_WAITS = """\
With `staging="lazy"` no write through `.data` may change the state before it is copied. Under Lightning and
transformers other hooks wait for the copy; in other loops such a write fails that save."""

BETTER = """\
If stock raises or crashes and the right value is known, we restore it: LBFGS, SparseAdam, parameters without a
gradient, an FSDP2 model after an evaluation. `python -m tests.conformance --all` lists them."""

ASKED_FOR_ITS_KEYS = """\
An object registered with Accelerate is asked for its `state_dict()` before a load, as in stock DCP, so that sharded
tensors are read for this world size."""

NAMES_GO_ON = """\
After `load_state`, Accelerate's automatic names continue. In stock the next `save_state` meets `checkpoint_0` and
raises."""

SAVES_ALONE = """\
Accelerate writes a replicated model on rank 0. Here all ranks write, so rank 0 waits for another rank before it saves
alone: 60 s at its first save, 1 s later. A rank that calls `save_state` after that saves nothing, and a warning names
the missing parts."""

WITHOUT_GROUP = """\
If torchrun or srun starts a script several times without `init_process_group`, stock writes all ranks to one path. We
warn once, and raise `CheckpointMismatch` if a rank meets a checkpoint or a save of another rank of the same launch.
Trainings with their own root continue. A launch is known by `TORCHELASTIC_RUN_ID`, `MASTER_ADDR` and `MASTER_PORT`, by
`SLURM_JOB_ID` and `SLURM_STEP_ID`, or by `PMIX_NAMESPACE`."""

OTHER_FILES = """\
Stock saves into any directory. We raise `SaveFailed`, and change nothing, if a directory has files and none belongs to
a checkpoint ([the way out](guides/migrate_stock_dcp.md#files-of-your-own-in-the-directory))."""

SAME_CALLS = """\
If ranks save different steps to one path, stock writes parts of both. We raise `CheckpointMismatch` on all ranks,
unless they make the same call with the same path and `step`."""

REASONS = {
    "A save takes no step": NO_STEP,
    "Optimizer state is restored during gradient accumulation": RESTORES_STATE,
    "The optimizer state of an unsharded root is saved": FINDS_UNSHARDED,
    "Optimizer state keeps its dtype and type": EXACT_SLOTS,
    "All of an optimizer's own state_dict is restored": EXTRA_KEYS,
    "The class of an optimizer is compared": ANOTHER_CLASS,
    "Extra state keeps its keys": EXACT_KEYS,
    "Plain values are those of the checkpoint": GROWS,
    "A Stateful gets all its tensors": HANDS_OVER,
    "An empty mapping and None are filled": FILLS_EMPTY,
    "Objects are called in one order": ONE_ORDER,
    "Integers do not take floating-point numbers": CUTS_NOTHING,
    "A plain value is replaced by the saved one": REPLACES,
    "A value may differ between ranks": OWN_PER_RANK,
    "An unexpected key is an error": STRICT,
    "A failure on one rank is a failure on all": OWN_ERRORS,
    "Accelerate: a registered object is asked for its state first": ASKED_FOR_ITS_KEYS,
    "Accelerate: automatic names continue": NAMES_GO_ON,
    "Keys of an optimizer are flat": FLAT_KEYS,
    "A nested mapping is filled in place": IN_PLACE,
    "Errors are Exceptions": STOCK_ERRORS,
    "Messages differ": OTHER_WORDS,
    "A folder .dcp_plugin appears": WORKSPACE_STAYS,
    "A checkpoint has its own directory": OWN_FOLDER,
    "An unknown kind of URL is a ValueError": UNKNOWN_URL,
    "Lightning: between two epochs": EPOCHS,
    "Lightning: state_dict is called during a load": SEES_THE_MODEL,
    "Lightning: a load resolves no interpolation": RESOLVES_NOTHING,
    "A load executes no code": NO_CODE,
    "transformers: a checkpoint has its weights once": NO_SECOND_MODEL,
    "transformers: adapters under FSDP": ADAPTERS,
    "Lightning: hyper-parameters without code": NO_OBJECTS,
    "Lightning: objects that hooks add": HOOKS_ADD_VALUES,
    "Lightning: a checkpoint is a directory": A_DIRECTORY,
    "Accelerate: files are loaded to the CPU": MAPS_TO_CPU,
    "Accelerate: the main process waits": SAVES_ALONE,
    "Lists have DCP directories only": LISTS,
    "Lazy saves and writes through .data": LAZY_WAITS,
    "With local_dir, rotation sees published checkpoints": NOT_AT_ITS_PATH,
    "Ranks of a launcher without a process group": WITHOUT_GROUP,
    "Ranks make the same calls": SAME_CALLS,
    "A directory with other files": OTHER_FILES,
    "Cases in which stock fails": BETTER,
}
