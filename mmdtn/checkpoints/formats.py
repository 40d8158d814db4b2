"""Lists all checkpoint formats, and recognises the format of a file."""

from . import dtn, dvt, levit, pvt, swin, t2t, vit
from .format import State

FORMATS = {name: kind for family in (pvt, swin, vit, t2t, levit, dtn, dvt) for name, kind in family.FORMATS.items()}
# Names that stand for several formats.
GROUPS = {whose: tuple(name for name in FORMATS if name.startswith(f'{whose}-')) for whose in ('timm', 'dtn', 'mmdtn')}
GROUPS['auto'] = tuple(FORMATS)
CHOICES = (*(name for name in FORMATS if name.partition('-')[0] not in GROUPS), *GROUPS)


def recognise(state: State, said: str) -> str:
    """Returns the format of a checkpoint. ``said`` names a format or a group of formats."""
    if said not in CHOICES:
        raise ValueError(f'Unknown format {said!r}; choose one of {", ".join(CHOICES)}.')
    keys, among = list(state), GROUPS.get(said, (said,))
    fitting = [name for name in among if FORMATS[name].recognises(keys)]
    if said == 'auto':
        fitting = [name for name in fitting if FORMATS[name].in_auto(state)]
    if len(fitting) != 1:
        found = f'fit {fitting}' if fitting else 'fit none of them'
        raise ValueError(f'Tried the formats {", ".join(among)}. The keys {found}. The first keys are {keys[:4]}.')
    return fitting[0]
