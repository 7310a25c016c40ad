"""The reasons for our differences, by the title under which ``docs/differences.md`` has them."""

from __future__ import annotations

NO_STEP = """\
`get_state_dict` of torch gives an optimizer that has no state a step with gradients of zero, when it is saved and when
it is loaded. A save then changes the training: Adam's `step` is 1 too high ever after. We save what there is, and a
resumed optimizer without state has no state."""

RESTORES_STATE = """\
Where a parameter has a gradient, `set_state_dict` of torch does not invent the state that it needs for a load, and
leaves an optimizer without state as it is: the training goes on with moments of zero. We restore the state, whatever
gradients there are."""

FINDS_UNSHARDED = """\
After a forward without a backward the root of an FSDP2 model stays unsharded, and `get_state_dict` of torch does not
find the state of its optimizer: the checkpoint has none of it, without an error. We save and restore it."""

EXACT_SLOTS = """\
`Optimizer.load_state_dict` casts tensors in the state to the dtype of the parameter (but for `step`), and turns strings
into the text of a generator. What we restore has the dtype, the type and the value that was saved."""

EXTRA_KEYS = """\
`set_state_dict` of torch hands an optimizer's `load_state_dict` nothing but `state` and `param_groups`. Counters or
slow weights that its own `state_dict` returns beside these are lost. We save them and hand them over. An optimizer
whose `state_dict` has any other layout (flat names, a list of state dicts, the groups of two optimizers in one), which
torch's functions cannot read, is saved as stock saves a `Stateful`."""

ANOTHER_CLASS = """\
With `strict=True`, the default, we raise `CheckpointMismatch` before anything is overwritten if a checkpoint has the
state of another class of optimizers and lacks slots or group fields that the optimizer needs. Stock raises for the
first missing key, or at the first step. What has all of these, as AdamW for Adam, is loaded with a warning that names
both classes."""

EXACT_KEYS = """\
Stock reads the keys that the target has. An extra state that is a dict comes back with the keys of the target: what
the checkpoint has beyond them is lost, and integer keys come back as strings, beside the old ones. We restore the value
that was saved."""

GROWS = """\
Stock reads the keys that the target has. Plain values come back as they were saved: a dict of counters, and what a
`Stateful` is handed, has the plain values that the checkpoint has. Tensors are those of the target, as with stock."""

HANDS_OVER = """\
Stock does not read what the target does not have. A `Stateful` is handed the tensors that no rank's target has, too,
because its own `load_state_dict` judges them: it would not know that half of a model was left out. `strict=False` and
`unexpected="ignore"` do what stock does."""

FILLS_EMPTY = """\
Stock reads nothing into an empty mapping, and nothing into a None in whose place the checkpoint has a mapping. Both
receive all that is stored under their key, tensors too: `{"optim": optimizer.state_dict()}` of an optimizer that was
never stepped comes back with the saved state."""

ONE_ORDER = """\
Stock calls the objects of a state in the order of the mapping when it saves, and sorted by name when it loads; its
`set_state_dict` calls an optimizer before its module. We call modules first, then optimizers, then the others, each of
them sorted by name, in both. Ranks whose mappings have another order, as those made from a set, do not wait for each
other."""

CUTS_NOTHING = """\
Stock copies floating-point numbers into a tensor of integers and loses their fractions. We raise `CheckpointMismatch`
before anything is overwritten, because such a tensor cannot hold what was saved. Between floating-point dtypes both
convert."""

REPLACES = """\
Stock raises where the checkpoint has a tensor and the target a plain value, and where the checkpoint has a mapping and
the target a plain value as an entry of the state. We replace the value by what was saved."""

UNKNOWN_URL = """\
A path such as `nosuch://bucket/run` is a `ValueError`, which names the kinds of URLs that are known. Stock raises
`RuntimeError: Cannot detect which StorageReader or StorageWriter to use`."""

OWN_PER_RANK = """\
Under one key stock stores the value of one rank, the one with the least to write, and gives it to all ranks: without a
word they continue the random state and the data of that rank. Here the loaders and samplers of torchdata keep one
position for each rank, under `<name>.<rank>`, and so does a value in `PerRank`. Any other value under one key is that
of the first rank, and the first save warns if it differs between ranks. Numbers, tensors of one element and lists of
floats differ in every script and do not count, nor does the state of modules and optimizers."""

STRICT = """\
Stock passes over what a checkpoint has and the model has not. With `strict=True`, the default, we raise
`CheckpointMismatch` and name it, because it is as often a mistake as it is meant; `strict=False` does what stock
does. A key that another rank's model has, as with pipeline stages, is no error."""

OWN_ERRORS = """\
What a user's hook raises during a save is raised on all ranks as `SaveFailed`, and what it raises during a load on
several ranks as `CheckpointError`, with the class and the message of what the hook raised. Stock raises the hook's
exception on the rank where it happened; the others wait for that rank."""

STOCK_ERRORS = """\
Our errors are `CheckpointError`s, which are `Exception`s. Stock's `CheckpointException` derives from `BaseException`
and slips through `except Exception`."""

OTHER_WORDS = """\
Stock's planner says `Missing key in checkpoint state_dict` and `Size mismatch`. Ours raises `CheckpointMismatch`,
which names all keys at once with both shapes, and the option that loads the rest."""

WORKSPACE_STAYS = """\
The folder of checkpoints has one more entry, `.dcp_plugin`: checkpoints are made there, and its file `saves.figures`
has what each save took. A script that lists the folder has to pass over names that are not its own. With automatic
names of Accelerate it is in the project's folder, where Accelerate's `test_with_save_limit` expects `checkpoints`
alone."""

OWN_FOLDER = """\
Our writer refuses a directory that has other files than a checkpoint: a folder of data must not become a checkpoint
that retention deletes. Stock writes between them. So `torch_save_to_dcp("run/model.pt", "run")` needs another target,
such as `"run/step-1"`."""

FLAT_KEYS = """\
Keys of an optimizer are stored flat (`state.<FQN>.<slot>`). `_load_state_dict_from_keys("optimizer")` of torch, a
private function, returns them under these names, and `"optimizer.state"` selects none of them."""

IN_PLACE = """\
A nested mapping is filled in place. Stock assigns it to its key once more, so that a `__setitem__` of the user's own
class of mappings is called; a load of ours calls none."""

SHARDS_IN_VALUES = """\
Under FSDP2 an optimizer whose slot is a dict or a queue of sharded tensors (AggMo and AdaShift of `pytorch_optimizer`)
is refused with an error that names the key. Stock stores each tensor in it under a key of its own."""

EPOCHS = """\
Lightning resumes a checkpoint that was made between two epochs in four wrong ways: one batch too many with `max_steps`;
the next epoch skipped, if it was made after the last batch with a stateful dataloader or in `on_train_epoch_start`; and
shuffling that starts over. With ours the next epoch is begun as in a training that was not interrupted: with
`on_train_epoch_start`, new iterators and the same random numbers."""

SEES_THE_MODEL = """\
Lightning on one device, and with DDP, reads a file and hands it to `load_state_dict`. We read into the model and the
optimizer, as DCP does, and ask them for their `state_dict` for that: while loading, and only then, it is called more
often than by Lightning."""

RESOLVES_NOTHING = """\
What of a `DictConfig` among the hyper-parameters is an interpolation is one after the load, too; stock's
`load_from_checkpoint` resolves those at its top, which calls resolvers with what is in the checkpoint, and loses its
flags. In that call `on_load_checkpoint` finds such a configuration as a plain dict. Structured configs come back
without their class."""

NO_CODE = """\
Loading executes no code from a checkpoint. [These values](format.md#which-values-come-back-as-what-they-were) come back
as what they were, without their constructors; those of a class that is not imported come back plain, with a warning;
everything else cannot be saved, unless `allow_pickle` names it."""

ADAPTERS = """\
Checkpoints of a PEFT model have no `adapter_model.safetensors` under FSDP1, and none for prompt learning under FSDP:
PEFT gathers those in a way that hangs there. The adapters are in the checkpoint all the same."""

NO_SECOND_MODEL = """\
A checkpoint of `transformers.Trainer` has the weights once, in the DCP format: there is no `model.safetensors` and no
`optimizer.pt` in it, so `Model.from_pretrained("out/checkpoint-N")` finds none. `dcp_plugin.load({"model": model},
"out/checkpoint-N")` loads them into a model, `load_best_model_at_end` and `trainer.save_model()` work as always, and a
Trainer that overrides `save_model` or `_save` writes there what it writes.

The Trainer alone raises when it resumes from such a checkpoint, since it cannot read the optimizer. Where it would find
weights, which are a PEFT model's adapters or what an overridden `save_model` wrote, the checkpoint has a `scheduler.pt`
and a folder `optimizer`, so that it raises for want of `optimizer.pt` instead of starting with a new optimizer.

30 tests of transformers' own about checkpoints and callbacks, those that need no hub, pass with the Trainer alone. 19
of them pass with the mixin as they stand. Nine of the others look for `model.safetensors` in a checkpoint, and two
count the entries of the output directory, of which `.dcp_plugin` is one. With a reader of these checkpoints in place of
that file, and without that entry, 28 pass; the other two split the file `model.safetensors` itself."""

NO_OBJECTS = """\
Modules, functions and classes among Lightning's hyper-parameters are left out, with a warning: only executing pickled
code would restore them. Give them to `load_from_checkpoint` as arguments. What hooks find as
`checkpoint["state_dict"]` is a plain dict without torch's `_metadata`, and `storage_options` is a `TypeError`."""

HOOKS_ADD_VALUES = """\
Lightning pickles the module, metric or optimizer that `on_save_checkpoint` puts into a checkpoint. We raise
`UnsafeCheckpoint` with its key at the first save, on every rank, because only executing code would restore it. With
`allow_pickle=("extra.loss",)` it is stored as Lightning stores it, and comes back as a module."""

A_DIRECTORY = """\
A checkpoint is a directory on every strategy. Code that opens it with `torch.load`, or asks `os.path.isfile`, does not
find a file, and neither does `Model.load_from_checkpoint`: `DCPCheckpointIO().load_checkpoint(path)` and
`dcp_plugin.lightning.load_from_checkpoint` read it. A resume from a path without a checkpoint raises
`CheckpointNotFound`, a `FileNotFoundError` with a message of its own. Values that a test puts there by a mock, of a
loop for one, cannot be saved."""

LISTS = """\
`list_checkpoints`, `prune`, `keep_last` and the command line's `list` know DCP directories alone: who deletes what they
list never deletes what another tool saved. `latest` and auto-resume find those of the other tools, too."""

MAPS_TO_CPU = """\
`load_state` without `map_location` loads Accelerate's own files to the CPU first; Accelerate loads them on the device,
on several GPUs, where for that time they take the memory twice."""

NOT_AT_ITS_PATH = """\
A save that `durable_every` leaves out is in `local_dir` alone. Lightning's `last` links to what is published, and the
end of a fit brings the newest there, then links and deletes; until then the files of a run are fewer than with stock.
`save_total_limit` and `total_limit` count what is at its path; `local_keep` limits the rest. What a `ModelCheckpoint`
with `monitor` saves, and a Trainer with `metric_for_best_model`, goes to its path whatever `durable_every` says: the
best must not be lost to newer ones. What has gone wrong with a save on its way there is in the log, and raised by
`wait` and `close`, not by the next save, since nodes hear of it at different times."""

LAZY_WAITS = """\
With `staging="lazy"` the state of a save may not be written to through `.data` until it is copied. Under Lightning and
transformers every hook of somebody else's waits for that; elsewhere such a write is noticed and fails that save."""

BETTER = """\
Where stock raises or crashes and the value to restore is known, we restore it: LBFGS, SparseAdam, parameters that never
got a gradient, an FSDP2 model right after an evaluation. The tests compare that with the run that was not
interrupted. They are not listed here one by one; `python -m tests.conformance --all` prints them."""

ASKED_FOR_ITS_KEYS = """\
What was registered with Accelerate is asked for its `state_dict()` before it is loaded, as stock DCP does it: so that
sharded tensors in it are read as this world size needs them."""

NAMES_GO_ON = """\
After `load_state` the automatic names of Accelerate go on where the training was. With stock the next `save_state`
finds that `checkpoint_0` is there, and raises."""

SAVES_ALONE = """\
Accelerate writes a replicated model on rank 0, whichever ranks call `save_state`. Here all ranks write, so rank 0 waits
for another rank before it saves alone: 60 s at its first save, 1 s at later ones. Of two ranks that call `save_state`
more than that apart, the later one saves nothing, and a warning names what is missing."""

WITHOUT_GROUP = """\
A script that torchrun or srun has started several times and that never calls `init_process_group` saves and loads on
each rank by itself. Stock writes all of them to one path, and each resumes from what another one has written. We warn
once in each process, and raise `CheckpointMismatch` as soon as a rank meets a checkpoint, or a save in flight, of
another rank of the same launch. Trainings with a root of their own go on. A launch is known by `TORCHELASTIC_RUN_ID`,
`MASTER_ADDR` and `MASTER_PORT`, by `SLURM_JOB_ID` and `SLURM_STEP_ID`, or by mpirun's `PMIX_NAMESPACE`."""

OTHER_FILES = """\
Stock saves into any directory. We raise `SaveFailed`, and change nothing, if a directory has files and none of them is
of a checkpoint, because a checkpoint is replaced and deleted as a whole, by `keep_last` for one. prime-rl, for example,
writes `path/dataloader/rank_N.pt` and then calls `dcp.save(path)`. Save first, and write the files afterwards: then
they stay, also when a later save replaces the checkpoint. Or save to a folder below, such as `path/model`."""

SAME_CALLS = """\
Stock does not compare what ranks do: where one saves a step and another a later step to the same path, the checkpoint
has parts of both. With ours all ranks make the same call, with the same path and the same `step`, or all of them raise
`CheckpointMismatch`."""

REASONS = {
    "A save takes no step": NO_STEP,
    "Optimizer state is restored in the middle of an accumulation, too": RESTORES_STATE,
    "An unsharded root is no reason to lose the optimizer's state": FINDS_UNSHARDED,
    "Optimizer state comes back as it was saved": EXACT_SLOTS,
    "What an optimizer's own state_dict returns comes back": EXTRA_KEYS,
    "Another class of optimizers": ANOTHER_CLASS,
    "Extra state comes back as it was saved": EXACT_KEYS,
    "Plain values come back as they were saved": GROWS,
    "A Stateful judges what it does not have": HANDS_OVER,
    "An empty mapping and None are filled": FILLS_EMPTY,
    "Objects are called in one order": ONE_ORDER,
    "Integers do not take floating-point numbers": CUTS_NOTHING,
    "A plain value is replaced by whatever was saved": REPLACES,
    "A value of its own for each rank": OWN_PER_RANK,
    "What the model has not is an error": STRICT,
    "A failure on one rank is a failure on all": OWN_ERRORS,
    "What is registered is asked for its state first": ASKED_FOR_ITS_KEYS,
    "Automatic names go on": NAMES_GO_ON,
    "Keys of an optimizer are flat": FLAT_KEYS,
    "A nested mapping is filled in place": IN_PLACE,
    "Sharded tensors inside of one slot of an optimizer are refused": SHARDS_IN_VALUES,
    "Errors can be caught": STOCK_ERRORS,
    "Errors have words of their own": OTHER_WORDS,
    "A folder .dcp_plugin is beside the checkpoints": WORKSPACE_STAYS,
    "A checkpoint has a directory of its own": OWN_FOLDER,
    "An unknown kind of URL is a ValueError": UNKNOWN_URL,
    "Lightning: between two epochs": EPOCHS,
    "Lightning: a load sees what it fills": SEES_THE_MODEL,
    "Lightning: no interpolation is resolved by a load": RESOLVES_NOTHING,
    "Loading executes no code": NO_CODE,
    "transformers: a checkpoint has its weights once": NO_SECOND_MODEL,
    "transformers: adapters under FSDP": ADAPTERS,
    "Lightning: hyper-parameters without code": NO_OBJECTS,
    "Lightning: objects that hooks add": HOOKS_ADD_VALUES,
    "Lightning: a checkpoint is a directory": A_DIRECTORY,
    "Accelerate: where files are loaded to": MAPS_TO_CPU,
    "Accelerate: a save of the main process alone waits for the others": SAVES_ALONE,
    "What is listed may be deleted": LISTS,
    "Lazy saves and writes through .data": LAZY_WAITS,
    "With local_dir, what is not at its path yet is not linked or deleted": NOT_AT_ITS_PATH,
    "Ranks of a launcher without a process group": WITHOUT_GROUP,
    "Ranks that make different calls": SAME_CALLS,
    "A directory that has other files": OTHER_FILES,
    "What stock cannot save or load": BETTER,
}
