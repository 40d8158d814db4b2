"""Classification of images by their nearest neighbours among features of labelled images."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from mmengine.dist import all_gather, all_reduce, get_dist_info
from torch import Tensor, nn

from mmdtn.errors import UserError

QUERIES, IMAGES = 1024, 65536  # whose similarities are in memory at a time: 256 MB


class Features(NamedTuple):
    """Vectors of images, ``N x C`` and of unit length, and the labels of the images, ``N``."""

    vectors: Tensor
    labels: Tensor


def image_vectors(outputs: Any) -> Tensor:
    """``B x C`` from what a backbone or a neck gives: the last output, maps averaged."""
    last = outputs[-1] if isinstance(outputs, list | tuple) else outputs
    if not isinstance(last, Tensor) or last.dim() not in (2, 4):
        found = f'of shape {tuple(last.shape)}' if isinstance(last, Tensor) else f'a {type(last).__name__}'
        raise UserError(f'the last output of the backbone is {found}: a vector B x C or a map B x C x H x W is needed.')
    return last.mean((2, 3)) if last.dim() == 4 else last


@torch.no_grad()
def features_of(model: Any, batch: dict) -> Features:
    """Features of a batch, by a model of MMPretrain or :class:`DINO`: any with ``extract_feat``."""
    data = model.data_preprocessor(batch, False)
    vectors = F.normalize(image_vectors(model.extract_feat(data['inputs'])).float(), dim=1)
    samples = data['data_samples'] or []
    if len(samples) != len(vectors) or not all('gt_label' in sample for sample in samples):
        raise UserError(
            'the images have no labels: k-NN needs a dataset with labels, as CustomDataset with_label=True.'
        )
    return Features(vectors, torch.cat([sample.gt_label for sample in samples]).to(vectors.device))


def joined(parts: Sequence[Features], length: int) -> Features:
    """All ``length`` features of a dataset from the batches of all processes.

    mmengine's ``DefaultSampler`` gives each process every n-th image, and repeats some so that all have equally many.
    """
    vectors, labels = torch.cat([p.vectors for p in parts]), torch.cat([p.labels for p in parts])
    return Features(*(torch.stack(all_gather(each), 1).flatten(0, 1)[:length] for each in (vectors, labels)))


def extract(model: nn.Module, loader: Any) -> Features:
    """Features of all images of a loader, in the order of its dataset."""
    return joined([features_of(model, batch) for batch in loader], len(loader.dataset))


def neighbours(queries: Tensor, images: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Similarities of the ``k`` images that are closest to each query, and their numbers: ``Q x k``, best first.

    Memory is bounded: of the ``Q x N`` similarities only a part exists at a time.
    """
    found = [_among_all(some, images, k) for some in queries.split(QUERIES)]
    similarities, numbers = zip(*found, strict=True)
    return torch.cat(similarities), torch.cat(numbers)


def _among_all(queries: Tensor, images: Tensor, k: int) -> tuple[Tensor, Tensor]:
    best = queries.new_empty(len(queries), 0)
    numbers = torch.empty(len(queries), 0, dtype=torch.long, device=queries.device)
    for start in range(0, len(images), IMAGES):
        similarities = queries @ images[start : start + IMAGES].T
        values, places = similarities.topk(min(k, similarities.shape[1]), sorted=False)
        candidates = torch.cat((best, values), 1)
        best, chosen = candidates.topk(min(k, candidates.shape[1]))
        numbers = torch.cat((numbers, places + start), 1).gather(1, chosen)
    return best, numbers


def votes(similarities: Tensor, labels: Tensor, classes: int, temperature: float) -> Tensor:
    """``Q x classes``: each neighbour votes for its class with ``exp(similarity / temperature)``."""
    weights = (similarities / temperature).exp()
    return weights.new_zeros(len(weights), classes).scatter_add_(1, labels, weights)


def accuracy(
    queries: Features, images: Features, ks: Iterable[int] = (10, 20, 100, 200), temperature: float = 0.07
) -> dict[int, tuple[float, float]]:
    """Top-1 and top-5 in percent for each number of neighbours. Each process classifies its share of the queries."""
    ks = sorted(ks)
    if not ks or ks[0] < 1 or ks[-1] > len(images.labels):
        raise UserError(f'k={ks}: give numbers from 1 to {len(images.labels)}, which is the number of labelled images.')
    classes = int(torch.cat((queries.labels, images.labels)).max()) + 1
    rank, processes = get_dist_info()
    vectors, truth = queries.vectors[rank::processes], queries.labels[rank::processes, None]
    similarities, numbers = neighbours(vectors, images.vectors, ks[-1])
    labels = images.labels[numbers]
    found = {}
    for k in ks:
        ranking = votes(similarities[:, :k], labels[:, :k], classes, temperature).topk(min(5, classes)).indices
        right = ranking == truth
        counts = torch.stack((right[:, :1].sum(), right.sum())).double()
        all_reduce(counts, 'sum')
        top1, top5 = (100 * counts / len(queries.labels)).tolist()
        found[k] = (top1, top5)
    return found
