"""Exports a trained model to a file that runs without its config, its checkpoint and the MM packages."""

from .export import FILE_KINDS, export

__all__ = ['FILE_KINDS', 'export']
