import pytest

from mmdtn.engine.hooks import MissedValidationHook
from tests.engine.toy import train

LOOPS = {
    'epochs': dict(type='ResumableEpochLoop', max_epochs=4, val_interval=2),
    'iterations': dict(type='ResumableIterLoop', max_iters=20, val_interval=10),
}


class Killed(BaseException):
    pass


@pytest.mark.parametrize('kind', LOOPS)
@pytest.mark.parametrize('which', [1, 2])
def test_the_validation_that_was_killed_is_made_up_for(tmp_path, kind, which):
    """Also tests the last validation, which no training follows."""
    begun, finished = [], []

    def killed():
        begun.append(1)
        if len(begun) == which:
            raise Killed

    options = dict(
        loop=LOOPS[kind],
        sampler='DefaultSampler' if kind == 'epochs' else 'InfiniteSampler',
        by_epoch=kind == 'epochs',
        interval=1,
        hooks=[MissedValidationHook()],
    )
    with pytest.raises(Killed):
        train(tmp_path, validate=killed, **options)
    names = ('epoch_2.pth', 'epoch_4.pth') if kind == 'epochs' else ('iter_10.pth', 'iter_20.pth')
    train(tmp_path, tmp_path / names[which - 1], validate=lambda: finished.append(1), **options)
    assert len(finished) == 3 - which
    train(tmp_path, tmp_path / names[1], validate=lambda: finished.append(1), **options)
    assert len(finished) == 3 - which, 'what was finished is not done again'


@pytest.mark.parametrize('name', ['iter_9.pth', 'iter_10.pth'])
def test_inside_an_epoch_no_validation_is_due(tmp_path, name):
    """After the last batch of an epoch, the resumed run ends the epoch and then validates as usual."""
    loop, seen = LOOPS['epochs'], []
    train(tmp_path / 'whole', loop=loop, interval=1)
    train(
        tmp_path, tmp_path / 'whole' / name, loop=loop, hooks=[MissedValidationHook()], validate=lambda: seen.append(1)
    )
    assert len(seen) == 2
