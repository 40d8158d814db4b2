"""Generates the dataset of the demo and the tests.

The dataset uses COCO's format for detection and instance segmentation. With --classification, the images are stored in
class folders, which MMPretrain reads.

Example:
    python tools/dataset_converters/make_shapes.py DIRECTORY
"""

import argparse

from mmdtn.datasets import TRAIN, VAL, write_classification, write_coco
from mmdtn.errors import UserError, readable_errors


def run(args: argparse.Namespace) -> None:
    write, directory = (
        (write_classification, 'data/shapes_classification') if args.classification else (write_coco, 'data/shapes')
    )
    try:
        root = write(args.directory or directory, args.train, args.val, args.seed)
    except (ValueError, FileExistsError) as error:
        raise UserError(str(error)) from None
    print(f'{root}: {args.train} training images, {args.val} validation images, seed {args.seed}')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('directory', nargs='?', help='default: data/shapes, or data/shapes_classification')
    parser.add_argument('--train', type=int, default=TRAIN, help='number of training images (default: %(default)s)')
    parser.add_argument('--val', type=int, default=VAL, help='number of validation images (default: %(default)s)')
    parser.add_argument('--seed', type=int, default=0, help='the same seed gives the same files (default: %(default)s)')
    parser.add_argument(
        '--classification', action='store_true', help='draw one object per image, in a folder for each class'
    )
    parser.add_argument('--debug', action='store_true', help='show the traceback of every error')
    args = parser.parse_args()
    with readable_errors(args.debug):
        run(args)


if __name__ == '__main__':
    main()
