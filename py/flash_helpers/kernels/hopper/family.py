"""Where the Hopper family runs."""

from flash_helpers.kernels.family import Family

HOPPER = Family("hopper", first_target=90, only_target=True, instructions="wgmma")
