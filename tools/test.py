"""Tests a checkpoint with a config of any MM package.

Example:
    python tools/test.py CONFIG CHECKPOINT --out predictions.pkl
"""

import argparse
from pathlib import Path
from typing import Any

from mmengine.config import Config, ConfigDict
from mmengine.registry import HOOKS, MODELS

from mmdtn.engine.data_checks import check_data
from mmdtn.engine.launch import add_common_options, add_hook, build_runner, check_exists, leave_together, load_config
from mmdtn.errors import UserError, readable_errors
from mmdtn.registry import class_of, package_of

DUMPS = dict(mmdet='mmdet.DumpDetResults')  # run-length encodes masks, whereas mmengine's metric stores every pixel
TTA_MODELS = dict(
    mmdet=dict(type='DetTTAModel', tta_cfg=dict(nms=dict(type='nms', iou_threshold=0.5), max_per_img=100)),
    mmpretrain=dict(type='mmpretrain.AverageClsScoreTTA'),
)


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config')
    parser.add_argument('checkpoint')
    parser.add_argument('--out', help='write all predictions to this .pkl file')
    parser.add_argument('--show-dir', help='save images with the drawn predictions in this directory')
    parser.add_argument(
        '--tta',
        action='store_true',
        help='use test-time augmentation: by default horizontal flips, unless the config has its own',
    )
    add_common_options(parser)
    args = parser.parse_args(arguments)
    if args.out and not args.out.endswith(('.pkl', '.pickle')):
        parser.error(f'--out {args.out}: the file has to end in .pkl or .pickle')
    return args


def configure(args: argparse.Namespace) -> Config:
    cfg = load_config(args)
    check_exists(args.checkpoint)
    cfg.load_from, cfg.resume = args.checkpoint, False
    if args.out:
        dump_predictions(cfg, args.out)
    if args.show_dir:
        draw_predictions(cfg, args.show_dir)
    if args.tta:
        augment(cfg)
    add_hook(cfg, type='CheckClassesHook')
    add_hook(cfg, type='CheckWeightsHook')
    add_hook(cfg, type='ProgressHook')
    add_hook(cfg, type='SkipBrokenImagesHook', strict=args.strict)
    return cfg


def package(cfg: Config) -> str:
    """Returns the MM package of the model's class, or the config's default scope for classes of other packages."""
    return package_of(class_of(cfg.model, MODELS)) or cfg.get('default_scope', 'mmengine')


def dump_predictions(cfg: Config, path: str) -> None:
    evaluators = cfg.test_evaluator if isinstance(cfg.test_evaluator, list) else [cfg.test_evaluator]
    dump = DUMPS.get(package(cfg), 'DumpResults')
    cfg.test_evaluator = [*evaluators, dict(type=dump, out_file_path=path)]


def draw_predictions(cfg: Config, folder: str) -> None:
    hook = cfg.get('default_hooks', {}).get('visualization')
    if hook is None:
        raise UserError(
            "--show-dir needs the package's VisualizationHook as default_hooks.visualization in the config."
        )
    target = str(Path(folder).resolve())
    if package_of(class_of(hook, HOOKS)) == 'mmpretrain':
        hook.update(enable=True, out_dir=target, interval=1)
    else:
        hook.update(draw=True, test_out_dir=target)


def augment(cfg: Config) -> None:
    whose = package(cfg)
    if 'tta_model' not in cfg and whose not in TTA_MODELS:
        raise UserError(
            '--tta needs tta_model and tta_pipeline in the config, unless its model is from MMDetection or MMPretrain.'
        )
    dataset = cfg.test_dataloader.dataset
    while 'dataset' in dataset:
        dataset = dataset.dataset
    cfg.model = ConfigDict(**cfg.get('tta_model', TTA_MODELS.get(whose)), module=cfg.model)
    dataset.pipeline = cfg.get('tta_pipeline') or with_mirror_images(dataset.pipeline, whose)


def with_mirror_images(pipeline: list[Any], package: str) -> list[Any]:
    *steps, pack = pipeline
    if package == 'mmdet':
        keys = ('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor', 'flip', 'flip_direction')
        pack = dict(pack, meta_keys=keys)
    flip = 'mmdet.RandomFlip' if package == 'mmdet' else 'mmengine.RandomFlip'  # mmengine's scope contains mmcv's class
    flips = [dict(type=flip, prob=1.0), dict(type=flip, prob=0.0)]
    return [*steps, dict(type='TestTimeAug', transforms=[flips, [pack]])]


def run(args: argparse.Namespace) -> None:
    cfg = configure(args)
    runner = build_runner(cfg)
    check_data(runner, ('test',), args.strict)
    runner.test()


def main(arguments: list[str] | None = None) -> None:
    args = parse_args(arguments)
    with readable_errors(args.debug):
        run(args)
    leave_together()


if __name__ == '__main__':
    main()
