"""Every kind of prepared dataloader goes on where it was, or says what is to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import launch
from tests.launch import on_ranks
from tests.messages import logged


def _batches(loader: Any) -> list[list[int]]:
    return [batch[1].tolist() for batch in loader]


@pytest.mark.one_of
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"workers": 2}, marks=pytest.mark.long),
        {"late": True},
        {"data": {"use_seedable_sampler": True}},
        {"data": {"split_batches": True}},
    ],
    ids=["plain", "workers", "attached after prepare", "seedable", "split"],
)
def test_a_later_epoch_continues_in_its_middle(tmp_path: Path, options: dict[str, Any]) -> None:
    for layout, ranks in (("single", 1), ("ddp", 2)):
        launch.run(_later_epoch, ranks, tmp_path / layout, layout, options)


def _later_epoch(path: Path, layout: str, options: dict[str, Any]) -> None:
    from tests.accelerate import training as t

    run = t.start(layout, **options)
    first = _batches(run.loader)
    second: list[list[int]] = []
    for number, batch in enumerate(run.loader):
        second.append(batch[1].tolist())
        if number == 3:
            run.accelerator.save_state(str(path))
            drawn = torch.rand(3)
    third = _batches(run.loader)
    assert first != second != third
    other = t.start(layout, seed=4, **options)
    other.accelerator.load_state(str(path))
    rest = iter(other.loader)
    resumed = [next(rest)[1].tolist()]
    assert torch.equal(torch.rand(3), drawn), "the random stream of the training goes on, too"
    resumed += [batch[1].tolist() for batch in rest]
    assert resumed == second[4:]
    if not options.get("workers"):  # whose seeds come from the stream that drew less here
        assert len(third) == len(_batches(other.loader))


@on_ranks(2)
def test_without_a_position_of_its_own_it_says_how_many_batches_to_skip_unless_the_script_skips(tmp_path: Path) -> None:
    from tests.accelerate import training as t

    def epochs(run: Any, count: int) -> list[list[list[int]]]:
        return [_batches(run.loader) for _ in range(count)]

    run = t.start("ddp", stateful=False)
    first = epochs(run, 1)
    second = []
    for number, batch in enumerate(run.loader):
        second.append(batch[1].tolist())
        if number == 4:
            run.accelerator.save_state(str(tmp_path / "ck"))
            drawn = torch.rand(3)
    third = epochs(run, 1)
    assert first[0] != second

    other, said = t.start("ddp", seed=4, stateful=False), logged()
    other.accelerator.load_state(str(tmp_path / "ck"))
    rest = iter(other.accelerator.skip_first_batches(other.loader, 5))
    resumed = [next(rest)[1].tolist()]
    assert torch.equal(torch.rand(3), drawn)
    for number, batch in enumerate(rest):
        resumed.append(batch[1].tolist())
        if number == 1:
            other.accelerator.save_state(str(tmp_path / "again"))
    assert resumed == second[5:]
    assert epochs(other, 1) == third
    assert not [message for message in said if "skip_first_batches" in message]

    forgetful, said = t.start("ddp", seed=4, stateful=False), logged()
    forgetful.accelerator.load_state(str(tmp_path / "ck"))
    assert epochs(forgetful, 1) == [second]
    told = [message for message in said if "skip_first_batches" in message]
    assert len(told) == int(forgetful.accelerator.is_main_process)
    assert all("after batch 5 of an epoch" in text and "skip_first_batches(dataloader, 5)" in text for text in told)

    again = t.start("ddp", seed=5, stateful=False)
    again.accelerator.load_state(str(tmp_path / "again"))
    assert _batches(again.accelerator.skip_first_batches(again.loader, 8)) == second[8:]


@on_ranks(1)
def test_an_iterable_dataset_that_keeps_its_place_continues_on_the_same_ranks(tmp_path: Path) -> None:
    path = tmp_path / "ck"
    from tests.accelerate import training as t

    def prepared() -> tuple[Any, Any]:
        run = t.start("single", data={"dispatch_batches": False})
        run.accelerator.free_memory()
        return run.accelerator, run.accelerator.prepare(torch.utils.data.DataLoader(Stream(), batch_size=4))

    accelerator, loader = prepared()
    seen = []
    for number, batch in enumerate(loader):
        seen.append((batch[1].tolist(), torch.rand(()).item()))
        if number == 2:
            accelerator.save_state(str(path))
    other, loader = prepared()
    other.load_state(str(path))
    assert [(batch[1].tolist(), torch.rand(()).item()) for batch in loader] == seen[3:]


class Stream(torch.utils.data.IterableDataset[Any]):
    """Numbers, from a place that it keeps itself."""

    def __init__(self) -> None:
        self._next = 0

    def __iter__(self) -> Any:
        while self._next < 40:
            self._next += 1
            yield torch.zeros(6), self._next - 1
        self._next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = state["next"]


@on_ranks(2)
def test_dispatched_batches_continue_too(tmp_path: Path) -> None:
    _dispatched(tmp_path / "ck")


def _dispatched(path: Path, samples: int = 48, last: int = 3) -> None:
    from tests.accelerate import training as t

    options: dict[str, Any] = {"samples": samples, "data": {"dispatch_batches": True, "use_seedable_sampler": True}}
    run = t.start("ddp", **options)
    seen = []
    for number, batch in enumerate(run.loader):
        seen.append(batch[1].tolist())
        if number == last:
            run.accelerator.save_state(str(path))
    other = t.start("ddp", seed=4, **options)
    other.accelerator.load_state(str(path))
    assert _batches(other.loader) == seen[last + 1 :]


@pytest.mark.one_of(count=2)
@pytest.mark.parametrize("case", ["no shuffling", "prepared again", "an evaluation left early", "uneven batches"])
@on_ranks(1)
def test_a_loop_in_one_process_continues_as_if_it_had_not_stopped(tmp_path: Path, case: str) -> None:
    path = tmp_path / "ck"
    from torch.utils.data import DataLoader, RandomSampler, TensorDataset

    from tests.accelerate import training as t

    data = TensorDataset(torch.zeros(24, 6), torch.arange(24))

    def build() -> tuple[Any, Any, Any]:
        accelerator = t.start("single").accelerator
        accelerator.free_memory()
        options: dict[str, Any] = {"batch_size": 2, "shuffle": case != "no shuffling"}
        if case == "uneven batches":
            options = {"batch_sampler": Buckets(RandomSampler(data))}
        plain = DataLoader(data, **options)
        loader = accelerator.prepare(plain)
        if case == "prepared again":
            accelerator.free_memory()
            loader = accelerator.prepare(plain)
        return accelerator, loader, accelerator.prepare(DataLoader(data, batch_size=2))

    def train(loader: Any, evaluation: Any, after_four: Any = None) -> list[Any]:
        seen = []
        for number, batch in enumerate(loader, 1):
            if case == "an evaluation left early" and number % 4 == 3:
                seen.append(next(iter(evaluation))[1].tolist())
            seen.append((batch[1].tolist(), torch.rand(()).item()))
            if number == 4 and after_four is not None:
                after_four()
                seen.clear()
        return seen

    accelerator, loader, evaluation = build()
    rest = train(loader, evaluation, lambda: accelerator.save_state(str(path)))
    accelerator, loader, evaluation = build()
    accelerator.load_state(str(path))
    accelerator.save_state(str(path))  # before anything is read: the position is still the one that was loaded
    accelerator, loader, evaluation = build()
    accelerator.load_state(str(path))
    assert train(loader, evaluation) == rest


class Buckets(torch.utils.data.Sampler[Any]):
    """Batches of two or three."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Any:
        batch: list[int] = []
        for index in self.sampler:
            batch.append(index)
            if len(batch) >= 2 + index % 2:
                yield batch
                batch = []


@on_ranks(2)
def test_the_last_incomplete_group_of_dispatched_batches_is_not_lost(tmp_path: Path) -> None:
    _dispatched(tmp_path / "ck", samples=22, last=4)


@on_ranks(1)
def test_a_prepared_loader_can_be_pickled() -> None:
    import pickle

    from tests.accelerate import training as t

    run = t.start("single", stateful=False)
    assert len(_batches(pickle.loads(pickle.dumps(run.loader)))) == len(run.loader)
