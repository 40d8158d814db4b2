import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, Sampler

from mmdtn.engine import NumberedBatchSampler
from tests.engine import toy
from tests.engine.toy import train

BY_ITERATION = dict(type='ResumableIterLoop', max_iters=14)


def assert_same(whole, resumed, first):
    """Asserts that a resumed run saw the same samples as the whole run after iteration ``first``, and has the same
    weights.
    """
    runner, watch = whole
    resumed_runner, resumed_watch = resumed
    assert len(resumed_watch.seen) == len(watch.seen) - first
    for (*place, samples), (*resumed_place, resumed_samples) in zip(
        watch.seen[first:], resumed_watch.seen, strict=True
    ):
        assert place == resumed_place and torch.equal(samples, resumed_samples)
    for name, value in runner.model.state_dict().items():
        assert torch.equal(value, resumed_runner.model.state_dict()[name]), name


@pytest.mark.parametrize(
    'options',
    [
        dict(),
        dict(by_epoch=True, interval=1),
        dict(loop=BY_ITERATION, sampler='InfiniteSampler'),
        dict(accumulate=3),
        dict(workers=2),
        dict(loop=BY_ITERATION, sampler='InfiniteSampler', workers=2),
        dict(sampler='mmpretrain.RepeatAugSampler'),
        dict(sampler='mmpretrain.RepeatAugSampler', workers=2),
    ],
    ids=[
        'within-epoch',
        'by-epoch',
        'infinite',
        'accumulated',
        'workers',
        'infinite-workers',
        'repeats',
        'repeats-workers',
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, options):
    whole = train(tmp_path / 'whole', **options)
    name, first = ('epoch_1.pth', 5) if options.get('by_epoch') else ('iter_8.pth', 8)
    resumed = train(tmp_path / 'resumed', **options, load_from=tmp_path / 'whole' / name)
    assert_same(whole, resumed, first)


def test_resuming_at_the_last_batch_of_an_epoch_ends_the_epoch(tmp_path):
    whole = train(tmp_path / 'whole', interval=5)
    resumed = train(tmp_path / 'resumed', load_from=tmp_path / 'whole' / 'iter_10.pth')
    assert_same(whole, resumed, 10)


@pytest.mark.parametrize('options', [dict(), dict(loop=BY_ITERATION, sampler='InfiniteSampler')])
def test_without_a_seed_in_the_config_the_checkpoints_is_taken(tmp_path, options):
    whole = train(tmp_path / 'whole', seed=None, **options)
    resumed = train(tmp_path / 'resumed', seed=None, load_from=tmp_path / 'whole' / 'iter_8.pth', **options)
    assert_same(whole, resumed, 8)
    _, other = train(tmp_path / 'other', seed=None, **options)
    noise, other_noise = ({s[0, 1].item() for *_, s in watch.seen} for watch in (whole[1], other))
    assert not noise & other_noise, 'another run is augmented in another way'


def test_samples_do_not_depend_on_the_number_of_data_workers(tmp_path):
    _, alone = train(tmp_path / 'alone')
    _, helped = train(tmp_path / 'helped', workers=2)
    for (*_, samples), (*_, others) in zip(alone.seen, helped.seen, strict=True):
        assert torch.equal(samples, others)


def test_augmentation_differs_from_epoch_to_epoch(tmp_path):
    _, watch = train(tmp_path / 'run')
    noise = torch.cat([samples[:, 1] for *_, samples in watch.seen])
    assert len(noise.unique()) == len(noise) == 30


def test_repeats_of_an_image_are_augmented_each_by_itself(tmp_path):
    _, watch = train(tmp_path / 'run', sampler='mmpretrain.RepeatAugSampler')
    samples = torch.cat([samples for *_, samples in watch.seen])
    indices = (samples[:, 0] // 1).tolist()
    assert indices[0] == indices[1] == indices[2] != indices[3] and len(set(indices[:10])) == 4
    assert len(samples[:, 1].unique()) == len(samples) == 30


def test_an_epoch_of_another_length_starts_over(tmp_path):
    train(tmp_path / 'run')
    runner, watch = train(tmp_path / 'longer', length=14, load_from=tmp_path / 'run' / 'iter_8.pth')
    assert [place for *place, _ in watch.seen][:2] == [[1, 0], [1, 1]] and len(watch.seen) == 14
    assert runner.iter == runner.max_iters == 21


def test_processes_share_one_numbering(monkeypatch):
    """The augmentation of a sample does not depend on the number of processes."""

    def numbers(rank, world_size):
        monkeypatch.setattr('mmdtn.engine.numbered_batch_sampler.get_dist_info', lambda: (rank, world_size))
        sampler = EveryOther(range(rank, 8, world_size))
        batches = NumberedBatchSampler(sampler, 2, dict(type=BatchSampler, drop_last=False))
        return {i: n for batch in batches for i, n in zip(batch.indices, batch.numbers, strict=True)}

    class EveryOther(list):
        epoch = 2

    assert numbers(0, 1) == numbers(0, 2) | numbers(1, 2) == {i: 16 + i for i in range(8)}


@pytest.mark.parametrize('drop_last', [False, True])
def test_batches_are_those_of_the_batch_sampler_within(drop_last):
    settings = dict(type='mmdet.AspectRatioBatchSampler', drop_last=drop_last)
    sampler = Shapes([0, 1, 2, 3, 4])
    batches = NumberedBatchSampler(sampler, 2, settings)
    expected = [[1, 3], [0, 2]] if drop_last else [[1, 3], [0, 2], [4]]
    assert sorted(batch.indices for batch in batches) == sorted(expected)
    assert len(batches) == len(expected)


class Shapes(Sampler):
    """Dataset whose even images are wide and whose odd images are tall."""

    def __init__(self, indices):
        self.indices, self.dataset = indices, self

    def get_data_info(self, index):
        return dict(width=2 - index % 2, height=1.5)

    def __len__(self):
        return len(self.indices)

    def __iter__(self):
        return iter(self.indices)


def test_an_iteration_loop_goes_through_a_finite_sampler_again_and_again(tmp_path):
    """Each pass has another order and other augmentation, and a resumed run repeats both exactly."""
    whole = train(tmp_path / 'whole', loop=BY_ITERATION)
    samples = torch.cat([samples for *_, samples in whole[1].seen])
    indices = (samples[:, 0] // 1).tolist()
    assert sorted(indices[:10]) == sorted(indices[10:20]) == list(range(10)) and indices[:10] != indices[10:20]
    assert len(samples[:, 1].unique()) == 28
    resumed = train(tmp_path / 'resumed', loop=BY_ITERATION, load_from=tmp_path / 'whole' / 'iter_8.pth')
    assert_same(whole, resumed, 8)


def test_an_iteration_loop_without_a_full_batch_ends():
    sampler = Shapes([0])
    assert list(NumberedBatchSampler(sampler, 2, dict(type=BatchSampler, drop_last=True), endless=True)) == []


def test_mmpretrains_precise_bn_hook_averages_an_epoch(tmp_path, monkeypatch):
    """The hook reads the loader's batch size, which torch leaves None if there is a batch sampler."""
    from mmpretrain.engine.hooks import PreciseBNHook

    class WithBatchNorm(toy.Toy):
        def __init__(self):
            super().__init__()
            self.layers.insert(0, nn.BatchNorm1d(4))

    monkeypatch.setattr(toy, 'Toy', WithBatchNorm)
    runner, _ = train(tmp_path, hooks=[PreciseBNHook(num_samples=10)])
    assert runner.train_dataloader.batch_size == 2
    # The data are the index of a sample, 0 to 9, and a number between 0 and 1. The running mean would be about 4.
    assert runner.model.layers[0].running_mean[0].item() == pytest.approx(5, abs=0.3)
