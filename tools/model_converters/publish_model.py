"""Prepares a checkpoint for publication.

The tool keeps the weights and the metadata, which includes the config. It removes the states of optimizer, schedules
and logs. The first eight digits of the file's SHA-256 are added to its name, as expected by torch.hub and the model
zoos of MM.

Example:
    python tools/model_converters/publish_model.py EPOCH.pth OUT.pth  # writes OUT-1a2b3c4d.pth
"""

import argparse
import hashlib
import tempfile
from pathlib import Path

from mmdtn import checkpoints
from mmdtn.errors import readable_errors


def publish(source: str, out: Path) -> Path:
    checkpoint = checkpoints.load(source)
    # Tensors are cloned, because saving a view would include its whole storage.
    weights = {key: value.clone() for key, value in checkpoints.read(source).items()}
    if 'cfg' not in checkpoint.get('meta', {}):
        print(f'{source} has no config in its meta data. Users of the file have to know how the model was built.')
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:  # OUT may be the source
        unnamed = Path(folder, out.name)
        checkpoints.write(unnamed, dict(meta=checkpoint.get('meta', {}), state_dict=weights))
        digest = hashlib.sha256(unnamed.read_bytes()).hexdigest()[:8]
        return unnamed.rename(out.with_name(f'{out.stem}-{digest}.pth'))


def run(args: argparse.Namespace) -> None:
    try:
        print(f'written: {publish(args.source, args.out)}')
    except (ValueError, FileNotFoundError) as error:
        raise SystemExit(str(error)) from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('source')
    parser.add_argument('out', type=Path)
    parser.add_argument('--debug', action='store_true', help='show the traceback of every error')
    args = parser.parse_args()
    with readable_errors(args.debug):
        run(args)


if __name__ == '__main__':
    main()
