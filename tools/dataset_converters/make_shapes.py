"""The generated data set of the demo and the tests: python tools/dataset_converters/make_shapes.py [DIRECTORY]

COCO's layout, for detection and instance segmentation; with --classification class folders, for MMPretrain.
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
    print(f'{root}: {args.train} pictures for training, {args.val} for validation, seed {args.seed}')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('directory', nargs='?', help='data/shapes, or data/shapes_classification, if not said')
    parser.add_argument('--train', type=int, default=TRAIN, help='pictures for training (default: %(default)s)')
    parser.add_argument('--val', type=int, default=VAL, help='pictures for validation (default: %(default)s)')
    parser.add_argument('--seed', type=int, default=0, help='same seed, same bytes (default: %(default)s)')
    parser.add_argument(
        '--classification', action='store_true', help='one object a picture, in a folder for each class'
    )
    parser.add_argument('--debug', action='store_true', help='show the traceback of every error')
    args = parser.parse_args()
    with readable_errors(args.debug):
        run(args)


if __name__ == '__main__':
    main()
