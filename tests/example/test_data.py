"""The example's data: real, the same on every rank and every run, and independent of the number of ranks."""

import pytest
import torch
from stdlib_text import StdlibText, Windows, stdlib_source
from torch import Tensor


@pytest.fixture
def text() -> StdlibText:
    return StdlibText(context=64, batch_size=8, megabytes=0.05, seed=3)


def global_batches(
    text: StdlibText, ranks: int, *, position: dict | None = None, epoch: int = 0
) -> list[list[list[int]]]:
    """What all ranks together see, batch by batch, in an order that does not depend on who saw what."""
    shares = []
    for rank in range(ranks):
        loader = text.share(rank, ranks)
        loader.sampler.set_epoch(epoch)
        if position is not None:
            loader.load_state_dict(position)
        shares.append(list(loader))
    return [sorted(torch.cat(share).tolist()) for share in zip(*shares, strict=True)]


def position_after(text: StdlibText, batches: int, ranks: int) -> dict:
    loader = text.share(ranks - 1, ranks)
    for _, _ in zip(range(batches), loader, strict=False):
        pass
    return loader.state_dict()


def test_text_is_python_and_bounded() -> None:
    source = stdlib_source(20_000)
    assert len(source) == 20_000
    assert b"import " in bytes(source.tolist())


def test_a_window_ends_with_the_byte_that_starts_the_next() -> None:
    first, second = Windows(torch.arange(9), context=4)[[0, 1]]
    assert first.tolist() == [0, 1, 2, 3, 4]
    assert second.tolist() == [4, 5, 6, 7, 8]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_batch_is_the_same_text_on_any_number_of_ranks(text: StdlibText, ranks: int) -> None:
    assert global_batches(text, ranks) == global_batches(text, 1)


def test_epochs_differ(text: StdlibText) -> None:
    assert global_batches(text, 1, epoch=1) != global_batches(text, 1)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_position_saved_on_two_ranks_goes_on_with_the_next_batch(text: StdlibText, ranks: int) -> None:
    position = position_after(text, batches=5, ranks=2)
    assert global_batches(text, ranks, position=position) == global_batches(text, 1)[5:]


def test_ranks_that_do_not_divide_the_batch_are_refused(text: StdlibText) -> None:
    with pytest.raises(ValueError, match="3 ranks cannot share"):
        text.share(0, 3)


def test_batches_are_bytes_with_one_more_than_the_context(text: StdlibText) -> None:
    batch: Tensor = next(iter(text.share(0, 2)))
    assert batch.shape == (4, 65)
    assert batch.dtype == torch.int64
    assert 0 <= batch.min() <= batch.max() < 256
