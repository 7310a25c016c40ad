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

EXACT_KEYS = """\
Stock reads the keys that the target has. An extra state that is a dict comes back with the keys of the target: what
the checkpoint has beyond them is lost, and integer keys come back as strings, beside the old ones. We restore the value
that was saved."""

STRICT = """\
Stock passes over what a checkpoint has and the model has not. With `strict=True`, the default, we raise
`CheckpointMismatch` and name it, because it is as often a mistake as it is meant; `strict=False` does what stock
does."""

OWN_ERRORS = """\
What a user's hook raises during a save is raised on all ranks as `SaveFailed`, and what it raises during a load on
several ranks as `CheckpointError`, with the class and the message of what the hook raised. Stock raises the hook's
exception on the rank where it happened; the others wait for that rank."""

STOCK_ERRORS = """\
Our errors are `CheckpointError`s, which are `Exception`s. Stock's `CheckpointException` derives from `BaseException`
and slips through `except Exception`."""

NO_CODE = """\
Loading executes no code from a checkpoint. [These values](format.md#which-values-come-back-as-what-they-were) come back
as what they were, without their constructors; those of a class that is not imported come back plain, with a warning;
everything else cannot be saved, unless `allow_pickle` names it."""

BETTER = """\
Where stock raises or crashes and the value to restore is known, we restore it: LBFGS, SparseAdam, parameters that never
got a gradient, an FSDP2 model right after an evaluation. The tests compare that with the run that was not
interrupted. They are not listed here one by one; `python -m tests.conformance --all` prints them."""

REASONS = {
    "A save takes no step": NO_STEP,
    "Optimizer state is restored in the middle of an accumulation, too": RESTORES_STATE,
    "An unsharded root is no reason to lose the optimizer's state": FINDS_UNSHARDED,
    "Optimizer state comes back as it was saved": EXACT_SLOTS,
    "Extra state comes back as it was saved": EXACT_KEYS,
    "What the model has not is an error": STRICT,
    "A failure on one rank is a failure on all": OWN_ERRORS,
    "Errors can be caught": STOCK_ERRORS,
    "Loading executes no code": NO_CODE,
    "What stock cannot save or load": BETTER,
}
