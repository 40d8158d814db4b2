"""Writes corrupted copies of a folder of images.

As in ImageNet-C, each folder DST/CORRUPTION/SEVERITY has the same subfolders as SRC. The copies need up to 75 times as
much space as SRC. The tool prints the expected size before it writes anything. If the tool is run again, it writes only
missing images.

Example:
    python tools/dataset_converters/corrupt.py SRC DST
"""

import argparse
import io
import os
import shutil
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from mmdtn.datasets.corruption import SEVERITIES, Corruption, chosen
from mmdtn.errors import UserError, readable_errors
from mmdtn.files import write_whole

QUALITY = 85  # JPEG quality, as in ImageNet-C
ENDINGS = ('.jpg', '.jpeg', '.png')
SAMPLED = 8  # number of images used to estimate the size


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('source', type=Path, metavar='SRC')
    parser.add_argument('target', type=Path, metavar='DST')
    parser.add_argument(
        '--corruptions', nargs='+', default=['benchmark'], help='names, groups, benchmark or all (default: %(default)s)'
    )
    parser.add_argument('--severities', nargs='+', type=int, default=list(SEVERITIES), choices=SEVERITIES)
    parser.add_argument(
        '--processes', type=int, default=os.cpu_count(), help='number of processes (default: %(default)s)'
    )
    parser.add_argument('--yes', action='store_true', help='do not ask before writing')
    parser.add_argument('--debug', action='store_true', help='show the traceback of every error')
    return parser.parse_args(arguments)


def read(source: Path) -> np.ndarray:
    """Reads an image and converts it to RGB."""
    with Image.open(source) as image:
        return np.asarray(image.convert('RGB'))


def encode(rgb: np.ndarray, like: Path) -> bytes:
    file = io.BytesIO()
    suffix = like.suffix.lower()
    options = dict(quality=QUALITY) if suffix in ('.jpg', '.jpeg') else {}  # PNG is lossless
    Image.fromarray(rgb).save(file, format=Image.registered_extensions()[suffix], **options)
    return file.getvalue()


def corrupted(rgb: np.ndarray, name: str, severity: int, source: Path) -> np.ndarray:
    loaded = dict(img=rgb[..., ::-1], img_path=str(source))  # the format of MM's image loaders
    return Corruption(name, severity)(loaded)['img'][..., ::-1]


def write(job: tuple[Path, list[tuple[str, int, Path]]]) -> int:
    """Writes all missing copies of an image, and returns the number of new files."""
    source, targets = job
    todo = [target for target in targets if not target[2].exists()]
    if not todo:
        return 0
    rgb = read(source)
    for name, severity, target in todo:
        write_whole(target, encode(corrupted(rgb, name, severity, source), target))
    return len(todo)


def confirmed() -> bool:
    try:
        return input('Write them? [y/N] ').strip().lower() in ('y', 'yes')
    except EOFError:  # no terminal to answer from
        return False


def run(args: argparse.Namespace) -> None:
    names = chosen(args.corruptions)
    if args.target.resolve().is_relative_to(args.source.resolve()):
        raise UserError(
            f'{args.target} is inside {args.source}. Choose a target outside, or a second run would corrupt the copies.'
        )
    sources = sorted(path for path in args.source.rglob('*') if path.suffix.lower() in ENDINGS)
    if not sources:
        raise UserError(f'{args.source} has no images ({", ".join(ENDINGS)}).')
    cells = [(name, severity) for name in names for severity in sorted(set(args.severities))]
    middle = sorted(set(args.severities))[len(set(args.severities)) // 2]
    sampled = sources[:: -(-len(sources) // SAMPLED)]
    sizes = [len(encode(corrupted(read(p), name, middle, p), p)) for p in sampled for name in names]
    size = sum(sizes) / len(sizes) * len(sources) * len(cells)
    args.target.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(args.target).free
    print(
        f'{len(sources)} images with {len(cells)} corruptions each: {len(sources) * len(cells):,} files, about '
        f'{size / 2**30:.2f} GiB of {free / 2**30:.2f} GiB free in {args.target}',
        flush=True,
    )
    if size > free:
        raise UserError(f'{args.target} has not enough space: choose fewer --corruptions or --severities.')
    if not args.yes and not confirmed():
        raise UserError('nothing was written; use --yes to write without a question.')
    jobs = []
    for source in sources:
        inside = source.relative_to(args.source)
        targets = [(name, severity, args.target / name / str(severity) / inside) for name, severity in cells]
        jobs.append((source, targets))
    with ProcessPoolExecutor(args.processes) as pool:
        written = sum(pool.map(write, jobs, chunksize=4))
    print(f'written: {written:,} files in {args.target}')


def main(arguments: list[str] | None = None) -> None:
    args = parse_args(arguments)
    with readable_errors(args.debug):
        run(args)


if __name__ == '__main__':
    main()
