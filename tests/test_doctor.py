import sys

import pytest

from mmdtn import doctor


def report(capsys):
    code = doctor.main()
    return code, capsys.readouterr().out


def test_a_healthy_environment(capsys):
    code, text = report(capsys)
    assert code == 0 and 'Nothing is wrong.' in text and '->' not in text
    for name in (*doctor.NEEDED, 'mmcv ops', 'device', 'compiler', 'tensorboard'):
        assert f'\nok     {name} ' in text or f'ok     {name} ' in text


def test_what_is_missing_is_named_with_the_cure(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, 'mmdet', None)  # installed, but not to be imported
    code, text = report(capsys)
    assert code == 1 and '1 of ' in text
    assert '-> install it again: pip install --no-build-isolation onedl-mmdetection --force-reinstall' in text
    monkeypatch.setattr(doctor.metadata, 'packages_distributions', dict)
    assert '-> pip install --no-build-isolation onedl-mmdetection\n' in report(capsys)[1]


def test_mmcv_without_its_ops(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, 'mmcv.ops', None)
    code, text = report(capsys)
    assert code == 1 and 'wrong  mmcv ops' in text and 'MMCV_WITH_OPS=1' in text


@pytest.mark.parametrize(
    ('distribution', 'version', 'wrong'),
    [('mmdet', '3.3.0', False), ('onedl-mmdetection', '3.5.1', False), ('mmdet', '2.28.2', True)],
)
def test_openmmlabs_and_onedls_packages_go_by_their_versions(capsys, monkeypatch, distribution, version, wrong):
    import mmdet

    monkeypatch.setattr(mmdet, '__version__', version)
    whose = dict(doctor.metadata.packages_distributions(), mmdet=[distribution])
    monkeypatch.setattr(doctor.metadata, 'packages_distributions', lambda: whose)
    real = doctor.metadata.version
    monkeypatch.setattr(doctor.metadata, 'version', lambda name: version if name == distribution else real(name))
    code, text = report(capsys)
    assert code == wrong and f'{version}' in text
    assert ('it should be 3.0 or newer' in text) == wrong
