"""Figures of cascades of classifiers with early exits."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from .figures import COLUMNS, DASHES, MARKERS, Array, panels, picture, shades


def budget_curves(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]], exits: tuple[Sequence[float], Sequence[float]]
) -> Figure:
    """Plots top-1 accuracy against mean GFLOPs.

    Each line shows one method of choosing thresholds. Each star shows the accuracy when all images use the same exit.
    """
    figure, axes = panels(1, 1, 5.0)
    ax = axes[0, 0]
    for (label, (gflops, accuracy)), colour, dash, marker in zip(
        curves.items(), shades(len(curves)), DASHES, MARKERS, strict=False
    ):
        ax.plot(gflops, accuracy, color=colour, linestyle=dash, marker=marker, markersize=4, label=label)
    ax.plot(*exits, color='black', linestyle='none', marker='*', markersize=12, label='all images use the same exit')
    ax.set(xlabel='mean GFLOPs per image', ylabel='top-1 accuracy (%)')
    ax.legend()
    return figure


def exit_shares(gflops: Sequence[float], shares: Array) -> Figure:
    """Plots the share of images that leave at each of K exits against mean GFLOPs. ``shares`` is ``P x K``."""
    figure, axes = panels(1, 1, 4.2)
    ax = axes[0, 0]
    order = np.argsort(gflops)
    names = [f'exit {k}' for k in range(1, shares.shape[1] + 1)]
    for column, name, colour, dash, marker in zip(
        100 * shares[order].T, names, shades(len(names)), DASHES, MARKERS, strict=False
    ):
        x = np.asarray(gflops)[order]
        ax.plot(x, column, color=colour, linestyle=dash, marker=marker, markersize=4, label=name)
    ax.set(xlabel='mean GFLOPs per image', ylabel='images that exit there (%)', ylim=(0, 100))
    ax.legend()
    return figure


def examples(rows: dict[str, list[tuple[Array, str]]]) -> Figure:
    """Draws one row of small titled images for each name. If a name has no images, its row is empty."""
    figure, axes = panels(len(rows), COLUMNS, 1.9)
    for ax in axes.flat:
        ax.axis('off')
    for line, (name, pictures) in zip(axes, rows.items(), strict=True):
        line[0].axis('on')
        line[0].set(xticks=[], yticks=[])
        for ax, (image, title) in zip(line, pictures, strict=False):
            ax.axis('on')
            picture(ax, image, title)
        line[0].set_ylabel(name)
    return figure
