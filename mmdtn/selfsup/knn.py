"""Classification of images by their k nearest neighbours among labelled images."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from mmengine.dist import all_gather, all_reduce, get_dist_info
from torch import Tensor, nn

from mmdtn.errors import UserError

QUERIES, IMAGES = 1024, 65536  # chunk sizes, for which the similarities take 256 MB


class Features(NamedTuple):
    """Unit-length feature vectors ``N x C`` and labels ``N`` of images."""

    vectors: Tensor
    labels: Tensor


def image_vectors(outputs: Any) -> Tensor:
    """Returns the last output of a backbone or neck as vectors ``B x C``, averaging over maps."""
    last = outputs[-1] if isinstance(outputs, list | tuple) else outputs
    if not isinstance(last, Tensor) or last.dim() not in (2, 4):
        found = f'of shape {tuple(last.shape)}' if isinstance(last, Tensor) else f'of type {type(last).__name__}'
        raise UserError(f'The last output of the backbone is {found}. Expected a vector B x C or a map B x C x H x W.')
    return last.mean((2, 3)) if last.dim() == 4 else last


@torch.no_grad()
def features_of(model: Any, batch: dict) -> Features:
    """Computes the features of a batch with the method ``extract_feat`` of DINO and MMPretrain's models."""
    data = model.data_preprocessor(batch, False)
    vectors = F.normalize(image_vectors(model.extract_feat(data['inputs'])).float(), dim=1)
    samples = data['data_samples'] or []
    if len(samples) != len(vectors) or not all('gt_label' in sample for sample in samples):
        raise UserError(
            'The images have no labels. k-NN needs a dataset with labels, such as CustomDataset with with_label=True.'
        )
    return Features(vectors, torch.cat([sample.gt_label for sample in samples]).to(vectors.device))


def joined(parts: Sequence[Features], length: int) -> Features:
    """Gathers the features of a dataset's ``length`` images from all processes.

    With n processes, MMEngine's ``DefaultSampler`` gives each process every n-th image, and repeats some images so that
    all processes have the same number of images.
    """
    vectors, labels = torch.cat([p.vectors for p in parts]), torch.cat([p.labels for p in parts])
    return Features(*(torch.stack(all_gather(each), 1).flatten(0, 1)[:length] for each in (vectors, labels)))


def extract(model: nn.Module, loader: Any) -> Features:
    """Computes the features of all images of a loader, in the order of the dataset."""
    return joined([features_of(model, batch) for batch in loader], len(loader.dataset))


def neighbours(queries: Tensor, images: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Finds the ``k`` images closest to each query. Returns similarities and indices, ``Q x k``, closest first.

    Only some of the ``Q x N`` similarities are in memory at any time.
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
    """Sums ``exp(similarity / temperature)`` over each class's neighbours. The result has shape ``Q x classes``."""
    weights = (similarities / temperature).exp()
    return weights.new_zeros(len(weights), classes).scatter_add_(1, labels, weights)


def accuracy(
    queries: Features, images: Features, ks: Iterable[int] = (10, 20, 100, 200), temperature: float = 0.07
) -> dict[int, tuple[float, float]]:
    """Computes the top-1 and top-5 accuracy in percent for each number of neighbours.

    Each process classifies some of the queries, and all processes return the same result.
    """
    ks = sorted(ks)
    if not ks or ks[0] < 1 or ks[-1] > len(images.labels):
        raise UserError(
            f'k={ks} is not valid. Give numbers from 1 to {len(images.labels)}, the number of labelled images.'
        )
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
