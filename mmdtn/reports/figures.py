"""Draws arrays as figures.

Colours come from viridis, whose order stays visible in greyscale prints. Lines also differ in dashes and markers.
"""

import itertools
import textwrap
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter
from numpy.typing import NDArray

from mmdtn.analysis.curves import Curves, mean_and_spread, unit

Array = NDArray[Any]
WIDTH = 12.0  # inches
MAP = 'viridis'
COLUMNS = 8  # largest number of small images in a row; more would be too small to read
DASHES = ('-', '--', ':', '-.')
MARKERS = ('o', 's', '^', 'D', 'v', 'P', 'X', '*')
LABELLED = 8  # largest number of labelled objects in an image; for more objects, a legend shows the colours
STYLE: Any = {'font.size': 11, 'axes.grid': True, 'grid.alpha': 0.3, 'image.interpolation': 'nearest'}


def shades(number: int) -> list:
    """Returns colours from dark to light, without the lightest ones, which are hard to see on white."""
    return [mpl.colormaps[MAP](x) for x in np.linspace(0, 0.85, number)]


def panels(rows: int, columns: int, height: float, **options: Any) -> tuple[Figure, Array]:
    """Makes a figure of full width with ``rows x columns`` axes. Each row is ``height`` inches high."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, rows * height), layout='constrained')
        return figure, figure.subplots(rows, columns, squeeze=False, **options)


def picture(ax: Axes, image: Array, title: str = '', **options: Any) -> Any:
    shown = ax.imshow(image, **options)
    ax.set_title(title, fontsize=10)
    ax.set(xticks=[], yticks=[])
    ax.grid(False)
    return shown


def learning_curves(groups: dict[str, list[Curves]], metrics: list[str]) -> Figure:
    columns = min(2, len(metrics))
    figure, axes = panels(-(-len(metrics) // columns), columns, 4.8)
    for ax in axes.flat[len(metrics) :]:
        ax.axis('off')
    lines: dict = {}
    for ax, metric in zip(axes.flat, metrics, strict=False):
        for i, (name, runs) in enumerate(groups.items()):
            there = [run[metric] for run in runs if run.get(metric)]
            if not there:
                continue
            curve = mean_and_spread(there)
            x, y = list(curve), [mean for mean, _ in curve.values()]
            style = dict(color=shades(len(groups))[i], linestyle=DASHES[i % 4])
            marker = dict(marker=MARKERS[i % 8], markevery=max(1, len(x) // 12))
            ax.plot(x, y, label=f'{name} ({len(runs)} runs)' if len(runs) > 1 else name, **style, **marker)
            low, high = zip(*((mean - std, mean + std) for mean, std in curve.values()), strict=True)
            ax.fill_between(x, low, high, color=style['color'], alpha=0.2, linewidth=0)
        kind = unit(metric, [run for runs in groups.values() for run in runs if run.get(metric)])
        steps = {step for line in ax.lines for step in line.get_xdata()}
        if len(steps) == 1:
            ax.set_xlim(min(steps) - 1, max(steps) + 1)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        percent = metric.startswith('accuracy/')
        ax.set(xlabel=kind, ylabel=f'{metric} (%)' if percent else metric)
        lines |= dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
    figure.legend(lines.values(), lines.keys(), loc='outside lower center', ncols=2, handlelength=4)
    return figure


def attention_distance(models: dict[str, dict[str, tuple[Array, float]]]) -> Figure:
    """Draws the attention distance of each head and of uniform attention, by model and block.

    The second row of axes shows the ratio of the two distances.
    """
    figure, axes = panels(2, len(models), 3.9, sharey='row')
    for column, (label, blocks) in zip(axes.T, models.items(), strict=True):
        x = range(len(blocks))
        for ax, relative in zip(column, (False, True), strict=True):
            uniform = [1.0 if relative else value for _, value in blocks.values()]
            heads = [by_head / (value or np.nan) if relative else by_head for by_head, value in blocks.values()]
            for i, values in enumerate(heads):
                spread = np.linspace(-0.18, 0.18, len(values)) if len(values) > 1 else [0.0]
                ax.scatter(i + np.asarray(spread), values, s=22, color=shades(len(values)), zorder=3)
            ax.plot(x, [values.mean() for values in heads], 'k-', linewidth=1, label='mean of the heads')
            ax.plot(x, uniform, 'k_', markersize=22, markeredgewidth=2, label='uniform attention')
            ax.scatter([], [], s=22, color=shades(3)[1], label='a head (dark: the first)')
            block_axis(ax, list(blocks), 'block')
        column[0].set_title(label)
        column[0].legend(fontsize=10)
    axes[0, 0].set_ylim(bottom=0)
    axes[0, 0].set_ylabel("attention distance\n(tokens of the block's grid)")
    axes[1, 0].set_ylabel('over that of\nuniform attention')
    return figure


def block_axis(ax: Axes, names: Sequence[str], what: str) -> None:
    """Labels the x axis with block names, vertically if there are many."""
    ax.set_xticks(range(len(names)), [short(name) for name in names], rotation=90 if len(names) > 8 else 0)
    ax.set_xlabel(f'{what} ({"stage.block" if any("stages" in n for n in names) else "number"}, from 0)')


def short(name: str) -> str:
    """Shortens a module name: ``backbone.stages.0.blocks.1.norm2`` becomes ``0.1 norm2``."""
    parts = name.split('.')
    numbers = '.'.join(part for part in parts if part.isdigit())
    return numbers if parts[-1].isdigit() else f'{numbers} {parts[-1]}'.strip()


def magnitudes(layers: dict[str, tuple[Array, Array]], image: Array) -> Figure:
    """Draws an image and its ``K x h x w`` token magnitudes before and after each norm.

    At most ``COLUMNS`` heads are drawn.
    """
    heads = min(COLUMNS, max(len(before) for before, _ in layers.values()))
    figure, axes = panels(2 * len(layers), heads + 1, 1.75)
    for ax in axes.flat:
        ax.axis('off')
    for row, (name, (before, after)) in enumerate(layers.items()):
        ax = axes[2 * row, 0]
        ax.axis('on')
        picture(ax, image, f'{short(name)}\n{before.shape[1]} x {before.shape[2]} tokens')
        for line, (which, maps) in enumerate((('before', before), ('after', after))):
            for head in range(min(heads, len(maps))):
                ax = axes[2 * row + line, head + 1]
                ax.axis('on')
                shown = picture(ax, maps[head], f'head {head}' if which == 'before' else '', cmap=MAP)
                if head == 0:
                    ax.set_ylabel(which)
                bar = figure.colorbar(shown, ax=ax, shrink=0.8, ticks=MaxNLocator(3))
                bar.ax.tick_params(labelsize=9)
    figure.supxlabel('scale: norm of a token within the channels of a head', fontsize=11)
    return figure


def variation(models: dict[str, dict[str, dict[str, tuple[float, float]]]]) -> Figure:
    """Draws the mean and the median of the variation by model, norm and kind of statistics."""
    figure, axes = panels(len(models), 2, 4.4)
    for row, (label, norms) in zip(axes, models.items(), strict=True):
        for ax, which, title in zip(row, (0, 1), ('mean (the variation coefficient)', 'median'), strict=True):
            for kind, colour, marker, dash in zip(('LN', 'IN', 'DTN'), shades(3), MARKERS, DASHES, strict=False):
                there = [(i, kinds[kind][which]) for i, kinds in enumerate(norms.values()) if kind in kinds]
                if there:
                    ax.plot(*zip(*there, strict=True), color=colour, marker=marker, linestyle=dash, label=kind)
            block_axis(ax, list(norms), 'norm')
            ax.set(title=f'{label}: {title}', ylabel='|(x - mu) / x|', yscale='log' if which == 0 else 'linear')
            if which == 0:
                ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                ax.yaxis.set_minor_formatter(NullFormatter())
            ax.yaxis.set_major_formatter('{x:.3g}')
            ax.legend(title='mu of')
    return figure


def lambda_curves(curves: dict[str, dict[str, dict[int, Array]]]) -> Figure:
    """Draws each layer's lambdas for mean and variance over the training iterations.

    ``curves`` has the lambdas of all heads by kind, layer and iteration.
    """
    figure, axes = panels(1, 2, 6.2, sharey=True)
    for ax, (kind, title) in zip(axes[0], (('lambda_mean', 'mean'), ('lambda_var', 'variance')), strict=True):
        layers = curves[kind]
        styles = zip(shades(len(layers)), itertools.cycle(DASHES), itertools.cycle(MARKERS))
        for (name, steps), (colour, dash, marker) in zip(layers.items(), styles, strict=False):
            x = list(steps)
            values = np.array(list(steps.values()))
            every = max(1, len(x) // 6)
            ax.plot(x, values.mean(1), dash, color=colour, marker=marker, markevery=every, label=short(name))
            ax.fill_between(x, values.min(1), values.max(1), color=colour, alpha=0.12, linewidth=0)
        ax.set(title=f'lambda of the {title}', xlabel='iteration')
    axes[0, 0].set_ylabel('lambda (1: LayerNorm, 0: neighbourhood)')
    figure.legend(
        *axes[0, 0].get_legend_handles_labels(), loc='outside lower center', ncols=6, fontsize=10, handlelength=3
    )
    return figure


def lambdas(models: dict[str, dict[str, tuple[Array, Array]]]) -> Figure:
    """Draws each head's lambdas for mean and variance by model and layer."""
    figure, axes = panels(len(models), 1, 4)
    for (ax,), (label, layers) in zip(axes, models.items(), strict=True):
        for shift, which, marker, title in ((-0.17, 0, 'o', 'mean'), (0.17, 1, '^', 'variance')):
            colour = shades(3)[which]
            for i, pair in enumerate(layers.values()):
                x = i + shift + np.linspace(-0.1, 0.1, len(pair[which]))
                ax.scatter(x, pair[which], color=colour, marker=marker, s=26, label=None if i else title)
        ax.axhline(0.5, color='k', linestyle=':', linewidth=1)
        block_axis(ax, list(layers), 'layer')
        low, high = ax.get_ylim()
        ax.set_ylim(max(-0.02, low), min(1.02, high))
        ax.set(title=label, ylabel='lambda (1: LayerNorm,\n0: neighbourhood)')
    handles = axes[0, 0].get_legend_handles_labels()
    figure.legend(*handles, loc='outside lower center', ncols=2, title='one mark per head')
    return figure


def neighbourhood(start: Array, after: Array, query: tuple[int, int], reach: int = 10) -> Figure:
    """Draws the ``K x h x w`` weights of one query before and after training.

    Cells more than ``reach`` rows or columns away from the query are not drawn.
    """
    heads, height, width = after.shape
    y, x = query
    rows = slice(max(0, y - reach), min(height, y + reach + 1))
    columns = slice(max(0, x - reach), min(width, x + reach + 1))
    whole = (rows.stop - rows.start, columns.stop - columns.start) == (height, width)
    lines = -(-heads // COLUMNS)
    per_row = -(-heads // lines)
    figure, axes = panels(2 * lines, per_row, 1.3 * COLUMNS / max(per_row, 5) + 0.75)
    extent = (columns.start - 0.5, columns.stop - 0.5, rows.stop - 0.5, rows.start - 0.5)
    for ax in axes.flat:
        ax.axis('off')
    for head, (line, maps) in itertools.product(range(heads), enumerate((start, after))):
        ax = axes[2 * (head // per_row) + line, head % per_row]
        ax.axis('on')
        part = maps[head, rows, columns]
        share = '' if whole else f'\n{part.sum():.0%} of the weights shown'
        title = f'head {head}, {("start", "trained")[line]}\nlargest {part.max():.3f}{share}'
        picture(ax, part, title, cmap=MAP, extent=extent, vmin=0)
        ax.plot(x, y, 'x', color='white', markersize=9, markeredgewidth=3.5)
        ax.plot(x, y, 'x', color='black', markersize=7.5, markeredgewidth=1.5)
        ax.set_xticks([columns.start, columns.stop - 1])
        ax.set_yticks([rows.start, rows.stop - 1])
        ax.tick_params(labelsize=9)
    figure.supxlabel('column (cells)', fontsize=11)
    figure.supylabel('row (cells)', fontsize=11)
    return figure


def components(layers: dict[str, list[tuple[Array, Array]]], grid: dict[str, tuple[int, int]]) -> Figure:
    """Draws the ``T x 2`` principal components of tokens before and after each norm, with their shares of variance."""
    figure, axes = panels(len(layers), 4, 3.4)
    for row, (name, pair) in zip(axes, layers.items(), strict=True):
        height, width = grid[name]
        place = dict(row=np.repeat(np.arange(height), width), column=np.tile(np.arange(width), height))
        for axis, which in itertools.product(('row', 'column'), (0, 1)):
            points, shares = pair[which]
            ax = row[2 * which + (axis == 'column')]
            dots = ax.scatter(points[:, 0], points[:, 1], c=place[axis], cmap=MAP, s=12)
            figure.colorbar(dots, ax=ax, label=f'{axis} of the token', ticks=MaxNLocator(4, integer=True))
            ax.set_title(f'{short(name)}, {("before", "after")[which]}', fontsize=11)
            ax.set_xlabel(f'component 1 ({shares[0]:.0%})')
            ax.set_ylabel(f'component 2 ({shares[1]:.0%})' if len(shares) > 1 else '')
            ax.locator_params(nbins=4)
    return figure


def class_attention(images: list[tuple[Array, Array]]) -> Figure:
    """Draws each image next to its ``K x h x w`` attention maps, for at most ``COLUMNS`` heads."""
    heads = min(COLUMNS, len(images[0][1]))
    figure, axes = panels(len(images), heads + 1, WIDTH / (heads + 1) + 0.3)
    for row, (image, maps) in zip(axes, images, strict=True):
        picture(row[0], image)
        for head, ax in enumerate(row[1:]):
            picture(ax, maps[head], f'head {head}', cmap=MAP)
    return figure


def looks(images: list[tuple[Array, list[tuple[str, Any, list[tuple[str, Array]]]]]], classes: Sequence[str]) -> Figure:
    """Draws one row per image and model, with annotations, predictions and token magnitudes after some blocks."""
    lines = [(image, *model) for image, models in images for model in models]
    maps = max(len(line[3]) for line in lines)
    figure, axes = panels(len(lines), maps + 2, 2.6, width_ratios=[1.7, 1.7, *[1] * maps])
    for row, (image, label, sample, blocks) in zip(axes, lines, strict=True):
        for ax in row:
            ax.axis('off')
        for ax, truth in ((row[0], True), (row[1], False)):
            picture(ax, image)
            title = draw_sample(ax, sample, classes, truth)
            ax.set_title(title if truth else '\n'.join([*textwrap.wrap(label, 30), title]), fontsize=10)
        for ax, (name, magnitude) in zip(row[2:], blocks, strict=False):
            shown = picture(ax, magnitude, f'norm after\nblock {short(name)}', cmap=MAP)
            bar = figure.colorbar(shown, ax=ax, shrink=0.6, ticks=MaxNLocator(3))
            bar.ax.tick_params(labelsize=9)
    return figure


def draw_sample(ax: Axes, sample: Any, classes: Sequence[str], truth: bool, score: float = 0.3) -> str:
    """Draws the boxes and masks of a data sample on an image and returns a title for the image."""

    def name(label: Any) -> str:
        return classes[int(label)] if int(label) < len(classes) else str(int(label))

    instances = None if sample is None else sample.get('gt_instances' if truth else 'pred_instances')
    if instances is not None and 'labels' in instances:  # an image without annotations has instances without labels
        if not truth:
            instances = instances[instances.scores > score]
        colours = shades(max(len(classes), 2))
        height, width = ax.images[0].get_size()
        for i, label in enumerate(instances.labels.tolist()):
            box = instances.bboxes[i]
            x1, y1, x2, y2 = np.asarray(getattr(box, 'tensor', box)).flatten()
            for line, edge in ((3.2, 'white'), (1.6, colours[label % len(colours)])):
                ax.add_patch(mpl.patches.Rectangle((x1, y1), x2 - x1, y2 - y1, fill=False, ec=edge, lw=line))
            if len(instances) <= LABELLED:
                text = name(label) + ('' if truth else f' {float(instances.scores[i]):.2f}')
                patch = dict(fc='white', alpha=0.75, lw=0, pad=0.6)
                ax.text(max(x1, 0), max(y1, 0.06 * height), text, fontsize=7, va='bottom', bbox=patch, clip_on=True)
            if 'masks' in instances:
                masks = instances.masks
                mask = np.asarray(masks.masks[i] if hasattr(masks, 'masks') else masks[i], dtype=float)
                if 0 < mask.sum() < mask.size:
                    ax.contour(mask, [0.5], colors='white', linewidths=1.2)
        ax.set(xlim=(-0.5, width - 0.5), ylim=(height - 0.5, -0.5))  # boxes and contours change the limits of the axes
        if len(instances) > LABELLED:
            handles = [
                mpl.patches.Patch(color=colours[label % len(colours)], label=name(label))
                for label in sorted({*instances.labels.tolist()})
            ]
            ax.legend(handles=handles[:LABELLED], loc='upper center', bbox_to_anchor=(0.5, 0), fontsize=7, ncols=2)
        count = f'{len(instances)} object{"" if len(instances) == 1 else "s"}'
        return f'annotated: {count}' if truth else f'{count} above {score}'
    labels = None if sample is None else sample.get('gt_label' if truth else 'pred_label')
    if labels is None:
        return 'image' if truth else 'no prediction'
    text = ', '.join(name(label) for label in labels)
    return f'annotated: {text}' if truth else f'{text} ({float(sample.pred_score.max()):.0%})'


def norm_cost(models: dict[str, dict[str, dict[str, tuple[int, int]]]]) -> Figure:
    """Draws the parameters and FLOPs of each norm as bars, next to those of a LayerNorm in its place."""
    figure, axes = panels(len(models), 2, 4)
    for row, (label, norms) in zip(axes, models.items(), strict=True):
        kinds = list(dict.fromkeys(itertools.chain.from_iterable(norms.values())))
        for ax, which, title in zip(row, (0, 1), ('parameters', 'FLOPs per image (millions)'), strict=True):
            for i, kind in enumerate(kinds):
                there = [(n, v[kind][which] / (1e6 if which else 1)) for n, v in enumerate(norms.values()) if kind in v]
                x, y = zip(*there, strict=True)
                width = 0.8 / len(kinds)
                offset = (i - (len(kinds) - 1) / 2) * width
                colour, hatch = shades(2)[i % 2], ('', '///')[i % 2]
                ax.bar(np.array(x) + offset, y, width, color=colour, hatch=hatch, edgecolor='white', label=kind)
            block_axis(ax, list(norms), 'norm')
            ax.set(title=f'{label}: {title}', ylabel=title)
            ax.legend()
    return figure


def robustness(models: dict[str, dict[str, list[float]]], severities: Sequence[int], metric: str) -> Figure:
    """Draws the metric over severity for each corruption, with one line per model.

    Severity 0 stands for the clean images.
    """
    names = list(next(iter(models.values())))
    columns = min(4, len(names))
    figure, axes = panels(-(-len(names) // columns), columns, 2.6, sharey=True)
    for ax in axes.flat[len(names) :]:
        ax.axis('off')
    for ax, name in zip(axes.flat, names, strict=False):
        for i, (label, by_corruption) in enumerate(models.items()):
            style = dict(color=shades(len(models))[i], linestyle=DASHES[i % 4], marker=MARKERS[i % 8])
            ax.plot(severities, by_corruption[name], label=label, **style)
        ax.set_title(name.replace('_', ' '), fontsize=11)
        ax.set_xticks(severities)
    figure.supxlabel('severity', fontsize=11)
    figure.supylabel(f'{metric} (%)' if metric.startswith('accuracy/') else metric, fontsize=11)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc='outside lower center', ncols=2, handlelength=4)
    return figure


def corruptions(image: Array, by_name: dict[str, dict[int, Array]]) -> Figure:
    """Draws one image and its corrupted versions, with one row per corruption and one column per severity."""
    severities = list(next(iter(by_name.values())))
    figure, axes = panels(len(by_name), len(severities) + 1, 1.6)
    for row, (name, pictures) in zip(axes, by_name.items(), strict=True):
        picture(row[0], image)
        row[0].set_ylabel(name.replace('_', '\n'), fontsize=9)
        for ax, (severity, corrupted) in zip(row[1:], pictures.items(), strict=True):
            picture(ax, corrupted, f'severity {severity}' if row is axes[0] else '')
    return figure
