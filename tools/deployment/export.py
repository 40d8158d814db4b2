"""Exports a model as an ONNX file or as an exported program of torch.

Classifiers of MMPretrain return scores. RetinaNet, Faster R-CNN and Mask R-CNN return boxes, scores, labels and masks
after non-maximum suppression. The tool also writes a script predict.py next to the file, which runs the model without
torch. See docs/deployment.md.

Example:
    python tools/deployment/export.py CONFIG CHECKPOINT --out MODEL.onnx
"""

import argparse
from pathlib import Path

import torch

from mmdtn.errors import readable_errors
from mmdtn.export import FILE_KINDS, export


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('config')
    parser.add_argument('checkpoint')
    parser.add_argument('--out', required=True, type=Path, metavar='FILE')
    parser.add_argument(
        '--raw', action='store_true', help='export the raw outputs of the head, for any single-stage detector'
    )
    parser.add_argument('--size', type=int, nargs=2, metavar=('H', 'W'), help='fixed image size (default: any size)')
    parser.add_argument('--format', choices=FILE_KINDS, default='onnx', help='file format (default: %(default)s)')
    parser.add_argument('--debug', action='store_true', help='show the traceback of every error')
    args = parser.parse_args(arguments)
    if args.out.suffix != f'.{args.format}':
        parser.error(f'--out {args.out}: the name has to end in .{args.format}, as --format says')
    return args


def main(arguments: list[str] | None = None) -> None:
    args = parse_args(arguments)
    with readable_errors(args.debug):
        size = tuple(args.size) if args.size else None
        compared = export(args.config, args.checkpoint, args.out, args.raw, size, args.format)
    print(f'written: {args.out}, {args.out.stat().st_size / 1e6:.1f} MB')
    for c in compared:
        boxes = '' if c.boxes is None else f', {c.boxes} boxes'
        boxes += (
            '' if c.score_thr is None else f' over {c.score_thr:.2g}, as no score exceeds the score_thr of the config'
        )
        pixels = '' if c.pixels is None else f', {c.pixels:.1e} pixels'
        shape = ' x '.join(map(str, c.shape))
        print(f'{shape}{boxes}: the largest difference from the model is {c.difference:.1e}{pixels}')
        print(f'    {1000 * c.original:.0f} ms in torch, {1000 * c.exported:.0f} ms exported')
    print(f'(CPU, {torch.get_num_threads()} threads, torch {torch.__version__}, fastest of several runs)')


if __name__ == '__main__':
    main()
