"""Says which CUDA compiler and disassembler are used, for scripts that set up a machine.

``python -m flash_helpers.build.check_compiler`` exits with 0 and both, or with 1 and the reasons why one is
missing. Tests need the disassembler: without it they would skip what they say of machine code.
"""

import sys

from flash_helpers.build.errors import CompilerNotFoundError
from flash_helpers.build.nvcc import DISASSEMBLER_PACKAGES, find_nvcc
from flash_helpers.build.sass import find_tool

if __name__ == "__main__":
    try:
        nvcc = find_nvcc()
    except CompilerNotFoundError as error:
        sys.exit(str(error))
    cuobjdump = find_tool("cuobjdump")
    if cuobjdump is None:
        sys.exit(f"no cuobjdump: pip install {' '.join(DISASSEMBLER_PACKAGES)}")
    print(f"{nvcc.path}, version {nvcc.build}; {cuobjdump}")
