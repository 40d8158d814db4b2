"""Classifies test images by their k nearest neighbours among the training images.

The features are the output of the neck, or of the backbone if the model has no neck. The output is either one vector
per image or a map, which is averaged. The tool accepts any config of MMPretrain or configs/dino. For DINO, the teacher
is evaluated. Training and test images use the transforms of the test set. To use several processes, run the tool with
torchrun --nproc_per_node N and --launcher pytorch.

Example:
    python tools/analysis_tools/knn.py CONFIG CHECKPOINT --k 10 20 100 200
"""

import argparse
from typing import Any

from mmengine.config import Config
from mmengine.dist import is_main_process

from mmdtn.engine.data_checks import check_data
from mmdtn.engine.launch import add_common_options, add_hook, build_runner, check_exists, leave_together, load_config
from mmdtn.errors import UserError, readable_errors
from mmdtn.models import read_config


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('config')
    parser.add_argument('checkpoint')
    parser.add_argument(
        '--k', nargs='+', type=int, default=[10, 20, 100, 200], help='numbers of neighbours (default: 10 20 100 200)'
    )
    parser.add_argument(
        '--temperature', type=float, default=0.07, help='temperature of the votes (default: %(default)s)'
    )
    parser.add_argument('--batch-size', type=int, default=128, help='images per batch (default: %(default)s)')
    parser.add_argument(
        '--data', metavar='CONFIG', help='config with the images, if the config of the model has no test data'
    )
    parser.add_argument('--keep', metavar='FILE', help='save features and labels of both sets to this file')
    add_common_options(parser)
    return parser.parse_args(arguments)


def configure(args: argparse.Namespace) -> Config:
    cfg = load_config(args)
    check_exists(args.checkpoint)
    cfg.load_from, cfg.resume = args.checkpoint, False
    data = read_config(args.data) if args.data else cfg
    queries = data.get('test_dataloader') or data.get('val_dataloader')
    if not queries or not data.get('train_dataloader'):
        raise UserError(
            f'{args.data or args.config} has no training or no test data. Name a config that has both with --data.'
        )
    pipeline = innermost(queries.dataset).pipeline
    # Without dataset wrappers, each training image occurs exactly once.
    images = dict(innermost(data.train_dataloader.dataset), pipeline=pipeline, test_mode=True)
    loader = dict(
        batch_size=args.batch_size,
        num_workers=queries.get('num_workers', 0),
        sampler=dict(type='DefaultSampler', shuffle=False),
        collate_fn=dict(type='default_collate'),
    )
    cfg.test_dataloader = dict(loader, dataset=queries.dataset)
    cfg.test_cfg = dict(
        type='KNNLoop',
        bank=dict(loader, dataset=images),
        ks=args.k,
        temperature=args.temperature,
        stage='test',
        keep=args.keep,
    )
    cfg.test_evaluator = []
    cfg.train_dataloader = cfg.train_cfg = cfg.optim_wrapper = cfg.param_scheduler = None
    cfg.val_dataloader = cfg.val_cfg = cfg.val_evaluator = None
    add_hook(cfg, type='CheckWeightsHook')
    add_hook(cfg, type='ProgressHook')
    return cfg


def innermost(dataset: Any) -> Any:
    """Returns the config of the dataset inside all wrappers, which contains the pipeline."""
    while 'dataset' in dataset:
        dataset = dataset.dataset
    return dataset


def run(args: argparse.Namespace) -> None:
    cfg = configure(args)
    runner = build_runner(cfg)
    check_data(runner, ('test',), args.strict)
    metrics = runner.test()
    if is_main_process():
        for k in sorted(args.k):
            print(f'{k}-NN: top-1 {metrics[f"accuracy/{k}-NN"]:.2f}, top-5 {metrics[f"accuracy/{k}-NN_top5"]:.2f}')


def main(arguments: list[str] | None = None) -> None:
    args = parse_args(arguments)
    with readable_errors(args.debug):
        run(args)
    leave_together()


if __name__ == '__main__':
    main()
