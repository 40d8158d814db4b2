"""Makes a checkpoint fit to be given to others: python tools/model_converters/publish_model.py EPOCH.pth OUT.pth

Keeps the weights and the meta with its config, drops the states of optimizer, schedule and logs, and puts the first
eight digits of the file's SHA-256 into its name, as torch.hub and MM's model zoos expect: OUT-1a2b3c4d.pth.
"""

import argparse
import hashlib
import tempfile
from pathlib import Path

from mmdtn import checkpoints
from mmdtn.errors import readable_errors


def publish(source: str, out: Path) -> Path:
    checkpoint = checkpoints.load(source)
    weights = {key: value.clone() for key, value in checkpoints.read(source).items()}  # views would save whole storages
    if 'cfg' not in checkpoint.get('meta', {}):
        print(f'{source} has no config in its meta: whoever gets the file has to be told how the model was built.')
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:  # OUT itself may be the source
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
