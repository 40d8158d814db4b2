"""Compares k-NN with plain loops."""

import pytest
import torch
import torch.nn.functional as F

from mmdtn.errors import UserError
from mmdtn.selfsup import Features, accuracy, neighbours
from mmdtn.selfsup.knn import image_vectors

from .small import one_after_the_other


def features(number, classes=7, channels=16):
    """Returns features of overlapping classes, whose centres are the same in each call."""
    labels = torch.randint(classes, (number,))
    centres = torch.randn(classes, channels, generator=torch.Generator().manual_seed(1))
    return Features(F.normalize(centres[labels] + 2 * torch.randn(number, channels), dim=1), labels)


def test_the_accuracy_is_that_of_a_loop_over_all():
    images, queries = features(300), features(90)
    found = accuracy(queries, images, (200, 1, 10), temperature=0.07)
    assert list(found) == [1, 10, 200]
    for k, both in found.items():
        want = one_after_the_other(queries, images, k, 0.07)
        assert both[0] == pytest.approx(want[0]) and (k < 200 or both[1] == pytest.approx(want[1]))
    assert found[1][0] != found[200][0], 'else this test says little'


def test_neighbours_are_the_same_in_parts():
    """Uses more queries and images than one chunk contains."""
    images, queries = F.normalize(torch.randn(66_000, 3), dim=1), F.normalize(torch.randn(1030, 3), dim=1)
    similarities, numbers = neighbours(queries, images, 5)
    some = [0, 1023, 1024, 1029]
    values, want = (queries[some] @ images.T).topk(5)
    torch.testing.assert_close(similarities[some], values)
    assert (numbers[some] == want).float().mean() > 0.9 and numbers.max() > 65_536
    torch.testing.assert_close((images[numbers] * queries[:, None]).sum(-1), similarities)


@pytest.mark.parametrize('k', [0, 31])
def test_the_number_of_neighbours_is_checked(k):
    with pytest.raises(UserError, match='30'):
        accuracy(features(5), features(30), (k,))


def test_one_vector_an_image():
    maps = torch.randn(2, 5, 3, 4)
    torch.testing.assert_close(image_vectors((torch.zeros(2, 9), maps)), maps.mean((2, 3)))
    assert torch.equal(image_vectors([maps[..., 0, 0]]), maps[..., 0, 0])
    with pytest.raises(UserError, match=r'\(2, 5, 3\)'):
        image_vectors((maps[..., 0],))
