"""From a config and a checkpoint to a file that runs without either, and without MM packages."""

from .export import FORMATS, export

__all__ = ['FORMATS', 'export']
