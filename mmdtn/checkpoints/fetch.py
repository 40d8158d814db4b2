"""Downloads checkpoints from URLs. Each file is downloaded only once, and completely or not at all."""

import hashlib
import http.client
import re
import shutil
import sys
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote, urlsplit
from urllib.request import Request, urlopen

import torch
from filelock import FileLock
from tqdm import tqdm

from mmdtn.errors import UserError
from mmdtn.files import whole_file

# Many file names end with the first digits of the file's SHA-256. Eight decimal digits may be a date instead.
CHECKSUM = re.compile(r'-(?!(?:19|20)\d{6}\.)([0-9a-f]{8,64})\.[a-z]+$')
SAFETENSORS = re.compile(rb'.{5}\x00{3}\{', re.DOTALL)  # eight bytes give the length of the JSON header that follows
CHECKPOINT = re.compile(rb'PK|\x80|' + SAFETENSORS.pattern, re.DOTALL)  # torch saves either zip archives or pickles
SILENCE = 60  # seconds without data after which a connection counts as lost


class NotFetched(UserError, ValueError):
    """Raised when a checkpoint could not be downloaded."""


def fetch(url: str) -> Path:
    """Returns the path to a local copy of a checkpoint. If there is no copy yet, the file is downloaded.

    If several processes on a machine need the file, only one downloads it and the others wait. A file is deleted if it
    is incomplete, is not a checkpoint, or does not match the checksum in its name.
    """
    path = local_copy(url)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f'{path}.lock'):
            if not path.exists():
                _download(url, path)
    return path


def local_copy(url: str) -> Path:
    """Returns the path of the local copy in the cache of ``torch.hub``. The path contains all parts of the URL.

    ``torch.hub`` itself uses only the last part of a URL, but thousands of files are called ``model.safetensors``.
    """
    parts = urlsplit(url)
    names = [parts.netloc, *parts.path.split('/')]
    if parts.query:
        names[-1] += f'?{parts.query}'
    names = [quote(name, safe='') for name in names if name not in ('', '.', '..')]
    return Path(torch.hub.get_dir(), 'checkpoints', *names)


def _download(url: str, path: Path) -> None:
    with whole_file(path) as file:
        wrong = _copy(url, file)
        file.flush()
        if wrong := wrong or _what_is_wrong(Path(file.name), path.name):
            raise NotFetched(
                f'{url} was not fetched: {wrong}. Try again, or download the file by other means. Then save it as '
                f'{path}, or use its path instead of the URL.'
            )


def _copy(url: str, file: BinaryIO) -> str | None:
    """Downloads a URL to an open file. Returns an error message, or None on success."""
    request = Request(url, headers={'User-Agent': 'mmdtn'})
    try:
        with urlopen(request, timeout=SILENCE) as response:
            size = int(response.headers.get('Content-Length') or 0)
            often = 0.1 if sys.stderr.isatty() else 10  # seconds between updates; in a log file, each update is a line
            name = f'Fetching {url.rpartition("/")[2]}'
            with tqdm.wrapattr(response, 'read', total=size, desc=name, mininterval=often) as body:
                shutil.copyfileobj(body, file)
    except (OSError, http.client.HTTPException) as error:
        return str(getattr(error, 'reason', error)) or type(error).__name__
    if size and file.tell() < size:  # http.client does not report this error
        return f'the connection ended after {file.tell()} of {size} bytes'
    return None


def _what_is_wrong(file: Path, name: str) -> str | None:
    with file.open('rb') as content:
        start = content.read(9)
        if not CHECKPOINT.match(start):
            return f'the download is not a checkpoint, it starts with {start!r}'
        digest = hashlib.sha256(start)
        while part := content.read(2**20):
            digest.update(part)
    wanted = CHECKSUM.search(name)
    if wanted and not digest.hexdigest().startswith(wanted[1]):
        return f'its SHA-256 should start with {wanted[1]}, as its name says, but is {digest.hexdigest()[:8]}...'
    return None
