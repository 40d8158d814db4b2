"""Classes that configs name."""

from collections.abc import Iterator, Mapping
from typing import Any

import mmengine.registry
from mmengine.registry import Registry


def class_of(settings: Mapping[str, Any], registry: Registry) -> Any:
    """What ``type`` names, in any of MM's three ways: ``'X'``, ``'scope.X'`` or the class ``X`` itself."""
    kind = settings['type']
    if not isinstance(kind, str):
        return kind
    with registry.switch_scope_and_registry(settings.get('_scope_')) as scoped:
        found = scoped.get(kind)
    if found is None:
        raise KeyError(f'{kind} is not in the {registry.name} registry.')
    return found


def package_of(kind: type) -> str:
    """The MM package, mmdet or mmpretrain, that a class or else one of its bases comes from; '' for neither."""
    packages = (base.__module__.partition('.')[0] for base in kind.__mro__)
    return next((package for package in packages if package in ('mmdet', 'mmpretrain')), '')


def registered() -> Iterator[tuple[str, Any]]:
    """Every name and class, of all registries of all packages that are imported."""
    registries = [value for value in vars(mmengine.registry).values() if isinstance(value, Registry)]
    for registry in registries:
        yield from registry.module_dict.items()
        registries.extend(registry.children.values())
