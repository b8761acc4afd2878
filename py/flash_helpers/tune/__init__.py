"""Finding the fastest configuration of each kind of problem, and remembering it.

``tune`` measures, ``lookup`` and ``TuningResults`` read. Importing this package imports neither torch nor
a GPU; measuring does.
"""

from flash_helpers.results.bucket import Bucket
from flash_helpers.results.database import TuningDatabase
from flash_helpers.results.device import TunedDevice
from flash_helpers.results.lookup import TunedBucket, TunedKernel, TuningResults, lookup, tuned_configs
from flash_helpers.results.measurement import Measurement

__all__ = [
    "Bucket",
    "Measurement",
    "TunedBucket",
    "TunedDevice",
    "TunedKernel",
    "TuningDatabase",
    "TuningResults",
    "lookup",
    "tuned_configs",
]
