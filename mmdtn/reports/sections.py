"""Sections of the report on DTN. Each section consists of a figure, its values, and a text that explains it."""

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
        report.leave_out('Attention distance (Fig. 2 of the paper)', 'This figure needs a backbone of this package.')
        return
    report.figure(
        'attention_distance',
        'Attention distance (Fig. 2 of the paper)',
        'Average distance of the tokens that a head attends to. A head at the level of the bar attends to the whole '
        'map equally. A head far below the bar attends to nearby tokens. The position of a key of a reduced map is the '
        'centre of the tokens that it summarises. Positions within windows are positions in the whole map. The class '
        'token has no position and is left out.',
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
            f'{run.first.name}. LayerNorm gives all tokens about the same norm over all heads together, so the maps '
            'after LayerNorm show how this norm is distributed over the heads. DTN preserves differences between '
            'tokens where lambda is small.' + (f' Only the first {figures.COLUMNS} heads are drawn.' if many else ''),
            figures.magnitudes(shown, run.first.picture),
            ('norm', 'head', 'row', 'column', 'before', 'after'),
            rows,
        )


def draw_class_attention(report: Report, runs: list[Observation]) -> None:
    for number, run in enumerate(runs):
        if not run.class_attention:  # the model has no class token
            continue
        shown = [(seen.picture, maps.numpy()) for seen, maps in run.class_attention]
        many = len(shown[0][1]) > figures.COLUMNS
        report.figure(
            f'class_attention{_number(number)}',
            f'What the class token attends to: {run.trained.label}',
            'Attention weights of the class token to each token of the image in the last block, for each head. Light '
            'colours are large weights, and each map has its own scale. After pre-training with DINO, the heads tend '
            'to attend to objects.' + (f' Only the first {figures.COLUMNS} heads are drawn.' if many else ''),
            figures.class_attention(shown),
            ('image', 'head', 'row', 'column', 'attention'),
            [
                [seen.name, *place, float(maps[place])]
                for seen, maps in run.class_attention
                for place in np.ndindex(*maps.shape)
            ],
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
        'The variation coefficient tells how much of a token remains, relative to the token, after the mean mu of each '
        'kind of norm is subtracted. It is the mean of |(x - mu) / x| over all elements of the same tokens. A few '
        'elements near 0 dominate this mean, so it is drawn on a log scale next to the median.',
        figures.variation(shown),
        ('model', 'norm', 'statistics', 'mean', 'median'),
        rows,
    )


def draw_lambdas(report: Report, runs: list[Observation]) -> None:
    runs = [run for run in runs if run.layers]
    if not runs:
        report.leave_out('Lambda of each head', 'None of the models has a DTN layer.')
        return
    shown: dict[str, dict[str, tuple[figures.Array, figures.Array]]] = {}
    for run in runs:
        mixes = {name: lambdas(layer) for name, layer in run.layers.items()}
        shown[run.trained.label] = {name: (mean.numpy(), var.numpy()) for name, (mean, var) in mixes.items()}
    report.figure(
        'lambda',
        'Lambda of each head',
        'The lambdas of all heads of all DTN layers of the checkpoint. A head with lambda 1 uses the statistics of the '
        'token itself, as LayerNorm does. A head with lambda 0 uses only those of its neighbourhood. The dotted line '
        'is the initial value, 1/2.',
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
        report.leave_out(title, 'No log was given. Pass the scalars.json of a run with DTNMonitorHook to --log.')
        return
    curves = read_lambdas(path)
    if not curves['lambda_mean']:
        report.leave_out(title, f'{path} has no lambdas. Pass the log of a run with DTN layers and DTNMonitorHook.')
        return
    report.figure(
        'lambda_over_training',
        title,
        'Each line is the mean lambda over the heads of a DTN layer, dark for the first layers and light for the last '
        'ones. The shaded area around it covers the range from the smallest to the largest head.',
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
        report.leave_out('P of one query token (Figs. 7, 8)', 'None of the models has a DTN layer.')
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
                f'The weights with which each head averages the statistics of other tokens for the token at the cross, '
                'at the start of training (upper row) and in the checkpoint (lower row). Light colours are large '
                f'weights. The grid is {grid} {cells}. Each map has its own scale; its largest value is in its title. '
                'Heads with random initial values are drawn with newly drawn values in the upper row.',
                figures.neighbourhood(start, trained, _centre(block.grid, layer.pool_size)),
                ('head', 'row', 'column', 'start', 'trained'),
                [[*place, float(start[place]), float(trained[place])] for place in np.ndindex(trained.shape)],
            )


def _centre(grid: tuple[int, int], pool_size: int) -> tuple[int, int]:
    """Returns the cell in the middle of a grid of tokens."""
    height, width = (-(-side // pool_size) // 2 for side in grid)
    return height, width


def draw_components(report: Report, runs: list[Observation]) -> None:
    for number, run in enumerate(runs):
        assert run.first is not None
        shown, grids, rows = {}, {}, []
        for name in run.shown_norms():
            block, _, before, after = run.norms()[name]
            if before.shape[1] * before.shape[2] < 3:
                report.leave_out(
                    f'Principal components of {name}', 'Two components need a map of three tokens or more.'
                )
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
            f'The tokens of {run.first.name}, projected on their first two principal components and coloured by row '
            'and by column of the token. If points of similar colour are close together, the tokens encode their '
            'position. The share of the variance of each component is in brackets.',
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
    notes = []
    samples = [seen.sample for run in runs for seen, _ in run.looks]
    annotations = [s.gt_instances for s in samples if s is not None and 'gt_instances' in s]
    if any('labels' in found and len(found) == 0 for found in annotations):
        notes.append('At least one of the images has no annotated objects.')
    if all(s is None for s in samples):
        notes.append('A bare backbone makes no predictions.')
    elif any(s is not None and 'pred_instances' in s and not (s.pred_instances.scores > 0.3).any() for s in samples):
        notes.append('Only boxes with a score above 0.3 are drawn.')
    report.figure(
        'where_it_looks',
        'Where the model looks',
        'Each row shows annotations, predictions and the norm of the tokens after some blocks, for one image and one '
        'model. Tokens at bright positions contribute most to the following layers. ' + ' '.join(notes),
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
    return [(trained.class_name(i), float(score)) for i, score in enumerate(sample.get('pred_score', ()))]


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
        'Parameters and FLOPs (multiply-adds) of each norm of a block for the first image, compared with those of a '
        'LayerNorm in its place. '
        + ' '.join(
            f'{run.trained.label} has {sum(p.numel() for p in run.trained.model.parameters()) / 1e6:.2f} M parameters '
            f'and {sum(_last(v)[1] for v in shown[run.trained.label].values()) / 1e6:.1f} M FLOPs in these norms.'
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
