"""Functions that look up the classes that configs name."""

from collections.abc import Iterator, Mapping
from typing import Any

import mmengine.registry
from mmengine.registry import Registry


def class_of(settings: Mapping[str, Any], registry: Registry) -> Any:
    """Returns the class that ``type`` names. MM allows ``'X'``, ``'scope.X'`` and the class ``X`` itself."""
    kind = settings['type']
    if not isinstance(kind, str):
        return kind
    with registry.switch_scope_and_registry(settings.get('_scope_')) as scoped:
        found = scoped.get(kind)
    if found is None:
        raise KeyError(f'{kind} is not in the {registry.name} registry.')
    return found


def package_of(kind: type) -> str:
    """Returns the MM package of a class or of one of its bases, which is 'mmdet', 'mmpretrain', or '' for neither."""
    packages = (base.__module__.partition('.')[0] for base in kind.__mro__)
    return next((package for package in packages if package in ('mmdet', 'mmpretrain')), '')


def registered() -> Iterator[tuple[str, Any]]:
    """Yields the name and the class of every entry in the registries of all imported packages."""
    registries = [value for value in vars(mmengine.registry).values() if isinstance(value, Registry)]
    for registry in registries:
        yield from registry.module_dict.items()
        registries.extend(registry.children.values())
