"""Studies train variants of one config with several seeds and compare them."""

from .page import write_results
from .records import Record, records
from .runs import Job, jobs, run_all
from .statistics import Comparison, compare, seeds_needed, std_interval
from .study import Study

__all__ = [
    'Comparison',
    'Job',
    'Record',
    'Study',
    'compare',
    'jobs',
    'records',
    'run_all',
    'seeds_needed',
    'std_interval',
    'write_results',
]
