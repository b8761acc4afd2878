"""The parts of the build that pyproject.toml cannot say: packages of several folders, and the binding.

The binding, a C++ extension, is optional: without a C++ compiler the package installs and runs on
the CPU backend, and the CUDA backend says how to get the binding. Who asks for it by name, with
``build_ext``, gets it or an error: an older one left in place would be taken for it.
"""

import re
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "py"))

from flash_helpers.kernels.cpp_headers import write_headers  # noqa: E402

BINDING = "flash_attention_kernels"
HEADERS = ("binding/*.hpp", "include/*.cuh", "include/generated/*")  # that the binding reads
write_headers(ROOT / "src" / "include")  # sources of the binding and of the kernels, so they travel with both


class BuildBinding(build_ext):
    """Builds the binding. In a checkout it removes older ones for one Python, which would be loaded first."""

    def run(self) -> None:
        super().run()
        if self.inplace:
            for old in Path().glob(f"{BINDING}.cpython-*"):
                old.unlink()


def readme_for_the_index() -> str:
    """README.md with absolute links: on the package index, relative ones lead nowhere."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    repository = re.search(r'^Repository = "(.+)"$', project, re.MULTILINE)[1]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"(!\[[^\]]*\]\()(?!https?:|#)", rf"\1{repository}/raw/main/", text)
    return re.sub(r"((?<!!)\[[^\]]*\]\()(?!https?:|#)", rf"\1{repository}/blob/main/", text)


setup(
    long_description=readme_for_the_index(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",  # here, since old and new setuptools want it differently in pyproject.toml
    packages=[
        *find_packages(include=["flash_attention*"]),
        *find_packages("py"),
        "flash_helpers.csrc",
        "flash_helpers.requirements",
    ],
    ext_modules=[
        Extension(
            BINDING,
            sources=["src/flash_attention.cpp"],
            include_dirs=["src", "src/include"],
            depends=sorted(str(path) for pattern in HEADERS for path in Path("src").glob(pattern)),
            # Without Python's own -g, whose debug information is ten times the code.
            extra_compile_args=["-std=c++20", "-fvisibility=hidden", "-fno-plt", "-g0"],
            language="c++",
            py_limited_api=True,  # as src/binding/python.hpp says
            optional="build_ext" not in sys.argv,
        )
    ],
    cmdclass={"build_ext": BuildBinding},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
    zip_safe=False,  # nvcc reads the headers from disk
)
