"""Where the Ampere family runs."""

from flash_helpers.kernels.family import Family

AMPERE = Family("ampere", first_target=80)
