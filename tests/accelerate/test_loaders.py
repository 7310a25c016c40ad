"""Every kind of prepared dataloader goes on where it was, or says what is to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.accelerate import WORLD_SIZE
from tests.launch import on_ranks
from tests.messages import logged
from tests.training import Stream


def _batches(loader: Any) -> list[list[int]]:
    return [batch[1].tolist() for batch in loader]


@pytest.mark.one_of("options")
@pytest.mark.parametrize("layout", ["single", "ddp"])
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
@on_ranks(of=lambda layout: WORLD_SIZE[layout])
def test_a_later_epoch_continues_in_its_middle(tmp_path: Path, layout: str, options: dict[str, Any]) -> None:
    from tests.accelerate import training as t

    run = t.start(layout, **options)
    first = _batches(run.loader)
    second: list[list[int]] = []
    for number, batch in enumerate(run.loader):
        second.append(batch[1].tolist())
        if number == 3:
            run.accelerator.save_state(str(tmp_path / "ck"))
            drawn = torch.rand(3)
    third = _batches(run.loader)
    assert first != second != third
    other = t.start(layout, seed=4, **options)
    other.accelerator.load_state(str(tmp_path / "ck"))
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
    from tests.accelerate import training as t

    path = tmp_path / "ck"

    def prepared() -> tuple[Any, Any]:
        run = t.start("single", data={"dispatch_batches": False})
        run.accelerator.free_memory()
        stream = Stream(40, lambda number: (torch.zeros(6), number))
        return run.accelerator, run.accelerator.prepare(torch.utils.data.DataLoader(stream, batch_size=4))

    accelerator, loader = prepared()
    seen = []
    for number, batch in enumerate(loader):
        seen.append((batch[1].tolist(), torch.rand(()).item()))
        if number == 2:
            accelerator.save_state(str(path))
    other, loader = prepared()
    other.load_state(str(path))
    assert [(batch[1].tolist(), torch.rand(()).item()) for batch in loader] == seen[3:]


@pytest.mark.parametrize(
    ("samples", "last"), [(48, 3), (22, 4)], ids=["whole groups", "an incomplete group at the end"]
)
@on_ranks(2)
def test_dispatched_batches_continue_too(tmp_path: Path, samples: int, last: int) -> None:
    from tests.accelerate import training as t

    options: dict[str, Any] = {"samples": samples, "data": {"dispatch_batches": True, "use_seedable_sampler": True}}
    run = t.start("ddp", **options)
    seen = []
    for number, batch in enumerate(run.loader):
        seen.append(batch[1].tolist())
        if number == last:
            run.accelerator.save_state(str(tmp_path / "ck"))
    other = t.start("ddp", seed=4, **options)
    other.accelerator.load_state(str(tmp_path / "ck"))
    assert _batches(other.loader) == seen[last + 1 :]


@pytest.mark.one_of(count=2)
@pytest.mark.parametrize("case", ["no shuffling", "prepared again", "an evaluation left early", "uneven batches"])
@on_ranks(1)
def test_a_loop_in_one_process_continues_as_if_it_had_not_stopped(tmp_path: Path, case: str) -> None:
    from torch.utils.data import DataLoader, RandomSampler, Sampler, TensorDataset

    from tests.accelerate import training as t

    path = tmp_path / "ck"

    class Buckets(Sampler[Any]):
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


@on_ranks(1)
def test_a_prepared_loader_can_be_pickled() -> None:
    import pickle

    from tests.accelerate import training as t

    run = t.start("single", stateful=False)
    assert len(_batches(pickle.loads(pickle.dumps(run.loader)))) == len(run.loader)
