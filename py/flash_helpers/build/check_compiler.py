"""Says which CUDA compiler is used, for scripts that set up a machine.

``python -m flash_helpers.build.check_compiler`` exits with 0 and the compiler, or with 1 and the
reasons why there is none.
"""

import sys

from flash_helpers.build.errors import CompilerNotFoundError
from flash_helpers.build.nvcc import find_nvcc

if __name__ == "__main__":
    try:
        nvcc = find_nvcc()
    except CompilerNotFoundError as error:
        sys.exit(str(error))
    print(f"{nvcc.path}, version {nvcc.build}")
