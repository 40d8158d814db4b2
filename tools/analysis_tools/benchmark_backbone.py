"""Time and saved bytes of PVT-Tiny with DTN and with LayerNorm, beside MMDetection's PVT, in one run.

python tools/analysis_tools/benchmark_backbone.py [--repeats 5] [--json results.json] [--only 224]

The ratios are what counts: the models take turns, round by round, and each time is a median over the rounds.
"""

import argparse
import json
import statistics
import time

import torch
from mmdet.models.backbones.pvt import PyramidVisionTransformer
from torch import Tensor, nn

from mmdtn.analysis import SavedBytes
from mmdtn.backbones import PVTDTN

DTN_HEADS = dict(base='tiny', num_heads=(4, 4, 5, 8))
# name: model, name of the one that it is compared with
MODELS = {
    'PVT-Tiny LN, heads 4 4 5 8': (lambda: PVTDTN(DTN_HEADS, norm_cfg=dict(type='LN')), None),
    'PVT-Tiny DTN eager': (lambda: PVTDTN('tiny'), 'PVT-Tiny LN, heads 4 4 5 8'),
    'PVT-Tiny DTN compiled': (
        lambda: PVTDTN('tiny', norm_cfg=dict(type='DTN', compiled=True)),
        'PVT-Tiny LN, heads 4 4 5 8',
    ),
    "MMDetection's PVT-Tiny": (lambda: PyramidVisionTransformer(num_layers=[2, 2, 2, 2]), None),
    'PVT-Tiny LN': (lambda: PVTDTN('tiny', norm_cfg=dict(type='LN')), "MMDetection's PVT-Tiny"),
}
INPUTS = {'224': (8, 3, 224, 224), '800': (1, 3, 800, 1344)}


def train_step(model: nn.Module, x: Tensor) -> int:
    """One forward and backward; returns the bytes kept between them."""
    with SavedBytes(model) as saved:
        loss = sum(m.mean() for m in model(x))
    loss.backward()
    return saved.total


def infer(model: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        model(x)


def measure(shape: tuple[int, ...], repeats: int) -> dict[str, dict]:
    x = torch.randn(shape)
    models = {name: make() for name, (make, _) in MODELS.items()}
    rows: dict[str, dict] = {}
    for name, model in models.items():
        train_step(model, x)  # compiles and warms up
        rows[name] = dict(saved_mib=train_step(model, x) / 2**20, train=[], infer=[])
    for _ in range(repeats):
        for name, model in models.items():
            for kind, run in (('train', train_step), ('infer', infer)):
                start = time.perf_counter()
                run(model, x)
                rows[name][kind].append(time.perf_counter() - start)
    for name, row in rows.items():
        row.update(train_s=statistics.median(row.pop('train')), infer_s=statistics.median(row.pop('infer')))
        if (peer := MODELS[name][1]) is not None:
            row['against'] = peer
    for row in rows.values():
        if peer := row.get('against'):
            row['ratios'] = {key: row[key] / rows[peer][key] for key in ('train_s', 'infer_s', 'saved_mib')}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--repeats', type=int, default=5)
    parser.add_argument('--only', choices=INPUTS, help='one of the two inputs')
    parser.add_argument('--json', help='write the results to this file as well')
    args = parser.parse_args()
    torch.manual_seed(0)
    print(f'torch {torch.__version__}, {torch.get_num_threads()} threads, float32')
    results = {}
    for key in [args.only] if args.only else INPUTS:
        shape = INPUTS[key]
        print(f'\n{" x ".join(map(str, shape)):30}{"train step":>12}{"inference":>12}{"saved":>12}', flush=True)
        results[key] = measure(shape, args.repeats)
        for name, row in results[key].items():
            print(f'{name:30}{row["train_s"]:10.3f} s{row["infer_s"]:10.3f} s{row["saved_mib"]:8.0f} MiB')
            if 'ratios' in row:
                ratios = ''.join(f'{row["ratios"][k]:11.2f}x' for k in ('train_s', 'infer_s', 'saved_mib'))
                print(f'{"  / " + row["against"]:30}{ratios}')
    if args.json:
        with open(args.json, 'w') as file:
            json.dump(dict(torch=torch.__version__, threads=torch.get_num_threads(), results=results), file, indent=1)


if __name__ == '__main__':
    main()
