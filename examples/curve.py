"""Loss curve of several lives, for a terminal and as a picture."""

from pathlib import Path

import matplotlib as mpl
import plotext

mpl.use("Agg")  # write a file, open no window

from matplotlib import pyplot

Losses = dict[int, float]  # step -> loss


def in_terminal(lives: list[Losses], width: int, *, colour: bool) -> str:
    """Return the curve as text. The digit of a life marks its points, so the curve is readable without colours."""
    figure = plotext.figure.plot_size(width, 20).theme("simple")
    for number, losses in enumerate(lives, start=1):
        figure.draw(figure.signal(list(losses), list(losses.values()), marker=str(number)))
    figure.label("step", "x").label("loss", "y")
    text = str(figure.build())
    return text if colour else plotext.uncolorize(text)


def as_png(file: Path, lives: dict[str, Losses], killed_at: int) -> None:
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for number, (name, losses) in enumerate(lives.items()):
        width = 2 + 3 * (
            len(lives) - 1 - number
        )  # where lives repeat steps, the wider line of the earlier life stays visible
        axes.plot(list(losses), list(losses.values()), label=name, linewidth=width)
    axes.axvline(killed_at, color="black", linestyle=":", label="SIGKILL in the middle of a save")
    axes.set(xlabel="step", ylabel="loss")
    axes.legend()
    figure.savefig(file, dpi=150)
    pyplot.close(figure)
