"""The parts of a report on DTN: for each a figure, how to read it, and the numbers behind it."""

from typing import Any

import numpy as np
from torch import nn

from mmdtn.analysis.cost import norm_flops
from mmdtn.analysis.logs import read_lambdas
from mmdtn.analysis.neighbourhood import at_start, attended, lambdas
from mmdtn.analysis.observe import Observation
from mmdtn.analysis.tokens import magnitudes, principal_components
from mmdtn.models import TrainedModel
from mmdtn.norms import DTN

from . import figures
from .report import Report


def draw_distances(report: Report, runs: list[Observation]) -> None:
    shown: dict[str, Any] = {}
    rows = []
    for run in runs:
        blocks = {}
        for name, found in run.distances.items():
            by_head = np.stack([d.by_head.numpy() for d in found])
            uniform = float(np.mean([d.uniform for d in found]))
            blocks[name] = by_head.mean(0), uniform
            for head, (mean, std) in enumerate(zip(by_head.mean(0), by_head.std(0), strict=True)):
                rows.append([run.trained.label, name, head, float(mean), float(std), uniform, len(found)])
        if blocks:
            shown[run.trained.label] = blocks
    if not shown:
        report.leave_out('Attention distance (Fig. 2 of the paper)', 'the attention of a converted model is its own.')
        return
    report.figure(
        'attention_distance',
        'Attention distance (Fig. 2 of the paper)',
        'How far away, on average, the tokens are that a head attends to. A head at the level of the bar looks at '
        'the whole map alike; one far below it looks nearby. Keys of a reduced map count at the centre of the tokens '
        'that they stand for, windows at their place in the map; the class token has no place and is left out.',
        figures.attention_distance(shown),
        ('model', 'block', 'head', 'distance_tokens', 'std_over_images', 'uniform_tokens', 'images'),
        rows,
    )


def draw_magnitudes(report: Report, runs: list[Observation]) -> None:
    for number, run in enumerate(runs):
        assert run.first is not None
        shown, rows = {}, []
        for name in run.shown_norms():
            block, norm, before, after = run.norms()[name]
            attended: Any = norm if isinstance(norm, DTN) else block.block.attn
            heads = attended.num_heads
            maps = (magnitudes(before, heads)[0].numpy(), magnitudes(after, heads)[0].numpy())
            shown[name] = maps
            for head, y, x in np.ndindex(maps[0].shape):
                rows.append([name, head, y, x, float(maps[0][head, y, x]), float(maps[1][head, y, x])])
        many = any(len(maps[0]) > figures.COLUMNS for maps in shown.values())
        report.figure(
            f'token_magnitudes{_number(number)}',
            f'Magnitude of tokens: {run.trained.label} (Fig. 1)',
            f'The norm of each token within the channels of a head, before and after a norm layer, for '
            f'{run.first.name}. LayerNorm makes all tokens about alike long, over all heads together, so that '
            'what the maps after it show is how the heads share; DTN lets differences between tokens through where '
            'lambda is small.' + (f' Of the heads, the first {figures.COLUMNS} are drawn.' if many else ''),
            figures.magnitudes(shown, run.first.picture),
            ('norm', 'head', 'row', 'column', 'before', 'after'),
            rows,
        )


def draw_variation(report: Report, runs: list[Observation]) -> None:
    shown = {
        run.trained.label: {
            name: {kind: tuple(np.mean(values, 0).tolist()) for kind, values in kinds.items()}
            for name, kinds in run.variations.items()
        }
        for run in runs
    }
    rows = [
        [label, name, kind, *pair]
        for label, norms in shown.items()
        for name, kinds in norms.items()
        for kind, pair in kinds.items()
    ]
    report.figure(
        'variation_coefficient',
        'Variation coefficient (Fig. 3b)',
        'How much of a token is left when the mean of each kind of norm is taken away, relative to the token: the mean '
        'over all elements of |(x - mu) / x|, for the same tokens. A few elements near 0 rule this mean (hence the '
        'log scale), so the median is drawn beside it.',
        figures.variation(shown),
        ('model', 'norm', 'statistics', 'mean', 'median'),
        rows,
    )


def draw_lambdas(report: Report, runs: list[Observation]) -> None:
    runs = [run for run in runs if run.layers]
    if not runs:
        report.leave_out('Lambda of each head', 'no model has a DTN layer.')
        return
    shown: dict[str, dict[str, tuple[figures.Array, figures.Array]]] = {}
    for run in runs:
        mixes = {name: lambdas(layer) for name, layer in run.layers.items()}
        shown[run.trained.label] = {name: (mean.numpy(), var.numpy()) for name, (mean, var) in mixes.items()}
    report.figure(
        'lambda',
        'Lambda of each head',
        'How each head of each DTN layer of the checkpoint mixes: at 1 it takes the statistics of the token itself, as '
        'LayerNorm, at 0 those of its neighbourhood alone. Training starts at 1/2, the dotted line.',
        figures.lambdas(shown),
        ('model', 'layer', 'head', 'lambda_mean', 'lambda_var'),
        [
            [label, name, head, float(mean), float(var)]
            for label, layers in shown.items()
            for name, pair in layers.items()
            for head, (mean, var) in enumerate(zip(*pair, strict=True))
        ],
    )


def draw_lambda_curves(report: Report, path: str | None) -> None:
    title = 'Lambda over training (Fig. 4)'
    if path is None:
        report.leave_out(title, 'no log was given (--log, the scalars.json of a run with DTNMonitorHook).')
        return
    curves = read_lambdas(path)
    if not curves['lambda_mean']:
        report.leave_out(title, f'{path} has no lambdas: it is not of a run with DTN layers and DTNMonitorHook.')
        return
    report.figure(
        'lambda_over_training',
        title,
        'The mean over the heads of each DTN layer, dark for the first layers and light for the last; the '
        'shade behind it reaches from the smallest head to the largest.',
        figures.lambda_curves(curves),
        ('quantity', 'layer', 'iteration', 'head', 'lambda'),
        [
            [kind, name, step, head, float(value)]
            for kind, layers in curves.items()
            for name, steps in layers.items()
            for step, values in steps.items()
            for head, value in enumerate(values)
        ],
    )


def draw_neighbourhoods(report: Report, runs: list[Observation]) -> None:
    if not any(run.layers for run in runs):
        report.leave_out('P of one query token (Figs. 7, 8)', 'no model has a DTN layer.')
    for number, run in enumerate(runs):
        for name in run.shown_norms() if run.layers else ():
            block, layer, *_ = run.norms()[name]
            assert isinstance(layer, DTN)
            start, trained = (
                attended(which, *block.grid, _centre(block.grid, layer.pool_size)).numpy()
                for which in (at_start(layer), layer)
            )
            grid = ' x '.join(map(str, trained.shape[1:]))
            cells = 'tokens' if layer.pool_size == 1 else f'cells of {layer.pool_size} x {layer.pool_size} tokens'
            report.figure(
                f'neighbourhood{_number(number)}_{figures.short(name).replace(" ", "_")}',
                f'P of one query token: {run.trained.label}, {name} (Figs. 7, 8)',
                f'What each head of the layer mixes into the statistics of the token at the cross, at the start of '
                f'training (upper row) and in the checkpoint; light is much. The grid is {grid} {cells}. Each picture '
                'has its own scale, whose largest value is written above it. Heads that start '
                'at random are drawn with another random start than the one that they had.',
                figures.neighbourhood(start, trained, _centre(block.grid, layer.pool_size)),
                ('head', 'row', 'column', 'start', 'trained'),
                [[*place, float(start[place]), float(trained[place])] for place in np.ndindex(trained.shape)],
            )


def _centre(grid: tuple[int, int], pool_size: int) -> tuple[int, int]:
    """The cell in the middle of a grid of tokens."""
    height, width = (-(-side // pool_size) // 2 for side in grid)
    return height, width


def draw_components(report: Report, runs: list[Observation]) -> None:
    for number, run in enumerate(runs):
        assert run.first is not None
        shown, grids, rows = {}, {}, []
        for name in run.shown_norms():
            block, _, before, after = run.norms()[name]
            if before.shape[1] * before.shape[2] < 3:
                report.leave_out(f'Principal components of {name}', 'a map of less than three tokens has no two.')
                continue
            grids[name] = block.grid
            pairs = (principal_components(tokens[0].flatten(0, 1)) for tokens in (before, after))
            shown[name] = [(places.numpy(), shares.numpy()) for places, shares in pairs]
            (first, _), (second, _) = shown[name]
            for i, (p, q) in enumerate(zip(first.tolist(), second.tolist(), strict=True)):
                rows.append([name, *divmod(i, block.grid[1]), *p, *q])
        if not shown:
            continue
        report.figure(
            f'principal_components{_number(number)}',
            f'Principal components of tokens: {run.trained.label} (Fig. 9)',
            f'The tokens of {run.first.name}, projected on the two directions in which they differ most, coloured by '
            'the row and by the column that they come from. Where neighbours in colour are neighbours in the plot, '
            'tokens tell where they are. In brackets the share of the variance that a direction holds.',
            figures.components(shown, grids),
            ('norm', 'row', 'column', 'before_1', 'before_2', 'after_1', 'after_2'),
            rows,
        )


def draw_looks(report: Report, runs: list[Observation]) -> None:
    images = []
    rows: list[list] = []
    for looks in zip(*(run.looks for run in runs), strict=True):
        models = [(r.trained.label, seen.sample, maps) for r, (seen, maps) in zip(runs, looks, strict=True)]
        images.append((looks[0][0].picture, models))
        for label, sample, maps in models:
            name = looks[0][0].name
            rows += [[name, label, 'prediction', *found] for found in _predictions(sample, runs[0].trained)]
            rows += [
                [name, label, f'magnitude after {block}', f'{y} {x}', float(values[y, x])]
                for block, values in maps
                for y, x in np.ndindex(values.shape)
            ]
    said = []
    samples = [seen.sample for run in runs for seen, _ in run.looks]
    annotations = [s.gt_instances for s in samples if s is not None and 'gt_instances' in s]
    if any('labels' in found and len(found) == 0 for found in annotations):
        said.append('An image without annotated objects is among them.')
    if all(s is None for s in samples):
        said.append('A bare backbone predicts nothing.')
    elif any(s is not None and 'pred_instances' in s and not (s.pred_instances.scores > 0.3).any() for s in samples):
        said.append('Where nothing scores above 0.3, no box is drawn.')
    report.figure(
        'where_it_looks',
        'Where the model looks',
        'Each row an image and a model: annotations, predictions, and the norm of the tokens after some '
        'blocks. Bright places carry much to the layers that follow. ' + ' '.join(said),
        figures.looks(images, runs[0].trained.classes),
        ('image', 'model', 'what', 'where', 'value'),
        rows,
    )


def _predictions(sample: Any, trained: TrainedModel) -> list[tuple[str, float]]:
    if sample is None:
        return []
    if 'pred_instances' in sample:
        found = sample.pred_instances
        return [
            (f'{trained.class_name(int(label))} at {" ".join(f"{v:.1f}" for v in box)}', float(score))
            for label, score, box in zip(found.labels, found.scores, found.bboxes.tolist(), strict=True)
        ]
    return [(trained.class_name(i), float(score)) for i, score in enumerate(sample.pred_score)]


def draw_cost(report: Report, runs: list[Observation]) -> None:
    shown: dict[str, dict[str, dict[str, tuple[int, int]]]] = {}
    for run in runs:
        norms = shown[run.trained.label] = {}
        for name, (_, norm, before, _) in run.norms().items():
            _, height, width, channels = before.shape
            norms[name] = {'LN': (2 * channels, norm_flops(nn.LayerNorm(channels), height, width, channels))}
            if isinstance(norm, DTN):
                norms[name]['DTN'] = (
                    sum(p.numel() for p in norm.parameters()),
                    norm_flops(norm, height, width, channels),
                )
    report.figure(
        'cost_by_layer',
        'Cost of each norm (Table 1)',
        'Parameters and multiply-adds of each norm of a block, beside those of LayerNorm in its place, for the first '
        'image. '
        + ' '.join(
            f'{run.trained.label}: {sum(p.numel() for p in run.trained.model.parameters()) / 1e6:.2f} M parameters in '
            f'all, {sum(_last(v)[1] for v in shown[run.trained.label].values()) / 1e6:.1f} M FLOPs in these norms.'
            for run in runs
        ),
        figures.norm_cost(shown),
        ('model', 'norm', 'kind', 'parameters', 'flops'),
        [
            [label, name, kind, *pair]
            for label, norms in shown.items()
            for name, kinds in norms.items()
            for kind, pair in kinds.items()
        ],
    )


def _last(kinds: dict) -> Any:
    return list(kinds.values())[-1]


def _number(run: int) -> str:
    return f'_{run + 1}' if run else ''
