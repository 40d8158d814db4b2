"""From a config and a checkpoint to a file that runs without either, and without MM packages."""

from .export import FILE_KINDS, export

__all__ = ['FILE_KINDS', 'export']
