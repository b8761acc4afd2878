"""The binding built with the address and undefined-behaviour sanitizers, under the tests of its memory."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from echo_kernel import ECHO, compile_library

from flash_helpers.build.sources import include_root

pytestmark = pytest.mark.compile

HERE = Path(__file__).parent
TESTS = [HERE / name for name in ("test_call_table_life.py", "test_binding_faults.py", "test_call_table.py")]
TESTS += [HERE.with_name("mods") / name for name in ("test_known_functions.py", "test_remembered_mods.py")]
FLAGS = ["-std=c++20", "-shared", "-fPIC", "-O1", "-g1", "-fno-omit-frame-pointer"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]

# Loads the sanitized binding, whatever else stands in front of the path.
PLUGIN = """
import sys
sys.path.insert(0, {folder!r})
import flash_attention_kernels
assert flash_attention_kernels.__file__.startswith({folder!r}), flash_attention_kernels.__file__
"""

# The kernel writes more than the output holds.
OVERFLOW = """
import ctypes, sys
import sanitized
import flash_attention_kernels as binding
from flash_helpers.kernel_configs import PLAIN, DType, FlashForwardKernelConfig

binding.load_library(sys.argv[1])
config = FlashForwardKernelConfig(DType.FP16, 64, 1, 1, 1, False, False, False, 0, 0, 0, False, False)
out = ctypes.create_string_buffer(100)
shape = (1, 1, 1, 64)
launch = binding.find(config, PLAIN, 1).launch
launch(*[ctypes.addressof(out)] * 4, 0, 0, *[shape] * 6, 1.0)
"""


def library(name):
    """A library of the compiler, as it is to be loaded before Python."""
    path = subprocess.check_output(["g++", f"-print-file-name={name}"], text=True).strip()
    assert Path(path).is_absolute(), f"g++ has no {name}: install its sanitizers, libasan and libubsan"
    return path


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """The variables under which Python loads the sanitized binding."""
    folder = tmp_path_factory.mktemp("sanitized")
    root = include_root()
    includes = ["-I", root.parent, "-I", root, "-I", sysconfig.get_paths()["include"]]
    source, binding = root.parent / "flash_attention.cpp", folder / "flash_attention_kernels.abi3.so"
    subprocess.run(["g++", *FLAGS, *SANITIZERS, *includes, source, "-o", binding], check=True)
    (folder / "sanitized.py").write_text(PLUGIN.format(folder=str(folder)))
    paths = [str(folder), str(HERE.parents[2]), str(HERE.parents[2] / "py")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONMALLOC": "malloc",  # Python's own pools would hide what is used after it was freed
        # libstdc++ too: else the sanitizer does not see exceptions that are thrown.
        "LD_PRELOAD": f"{library('libasan.so')} {library('libstdc++.so')}",
        "ASAN_OPTIONS": "detect_leaks=0",  # Python leaves much to the end of the process
    }


def run(environment, *arguments):
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)


def test_the_sanitizer_sees_what_is_wrong(environment, tmp_path):
    result = run(environment, "-c", OVERFLOW, compile_library(tmp_path, ECHO))
    assert result.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in result.stderr


def test_tables_libraries_and_launches_under_the_sanitizers(environment):
    result = run(environment, "-m", "pytest", "-q", "-x", "-p", "sanitized", "-p", "no:cacheprovider", *TESTS)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    assert " passed" in result.stdout
