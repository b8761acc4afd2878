"""The pages docs/adding-a-*.md, followed: diffs applied to a copy of the sources, blocks run there."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from flash_helpers.build.sass import disassemble, find_tool, parse_functions
from flash_helpers.build.store import STORE

pytestmark = pytest.mark.compile

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "adding-a-kernel.md"
DIRECTION_PAGE = ROOT / "docs" / "adding-a-direction.md"
TRAIT_PAGE = ROOT / "docs" / "adding-a-trait.md"
COPIED = ("flash_attention", "py", "src", "tests", "tools", "pyproject.toml", "setup.py", "README.md")
BLOCK = re.compile(r"^```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


def section(title: str, page: Path = PAGE) -> list[tuple[str, str]]:
    """(kind, text) of the fenced blocks under one heading, in order."""
    text = page.read_text(encoding="utf-8").split(f"\n## {title}\n")[1].split("\n## ")[0]
    return [(match["kind"], match["text"]) for match in BLOCK.finditer(text)]


def apply(diff: str, root: Path) -> None:
    """Applies a diff whose hunks have no line numbers: their old lines stand exactly once in the file.

    One from ``/dev/null`` makes a file that is not there yet.
    """
    old_name, new_name, *lines = diff.splitlines()
    if old_name == "--- /dev/null":
        path = root / new_name.removeprefix("+++ b/")
        assert {line[:1] for line in lines} == {"+"}, diff
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.writelines(line[1:] + "\n" for line in lines)
        return
    assert old_name.startswith("--- a/"), old_name
    assert old_name.removeprefix("--- a/") == new_name.removeprefix("+++ b/")
    path = root / old_name.removeprefix("--- a/")
    text = path.read_text(encoding="utf-8")
    for hunk in "\n".join(lines).split("\n@@\n"):
        rows = hunk.split("\n")
        assert {row[:1] for row in rows} <= {" ", "+", "-"}, hunk
        old = "".join(row[1:] + "\n" for row in rows if row[0] in " -")
        new = "".join(row[1:] + "\n" for row in rows if row[0] in " +")
        assert text.count(old) == 1, f"{path.name} holds these lines {text.count(old)} times:\n{old}"
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")


class Copy:
    """A copy of the sources with its own cache, in which the page's blocks run."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in COPIED:
            source = ROOT / name
            ignored = shutil.ignore_patterns("__pycache__", "*.so", "generated", "*.egg-info")
            if source.is_dir():
                shutil.copytree(source, root / name, ignore=ignored)
            else:
                shutil.copy(source, root / name)
        self.environment = os.environ | {
            "PYTHONPATH": f"{root}{os.pathsep}{root / 'py'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            "FLASH_ATTENTION_CACHE_DIR": str(root / "cache"),
            "CXXFLAGS": "-O0",  # the binding is built to be read, not to be quick
            "COLUMNS": "250",
        }

    def follow(self, blocks: list[tuple[str, str]]) -> str:
        """Applies diffs and runs commands in the order of the page; returns all that was printed."""
        printed = ""
        for kind, text in blocks:
            if kind == "diff":
                apply(text, self.root)
            elif kind == "python":
                printed += self.run([sys.executable, "-c", text])
            elif kind == "console":
                for line in text.splitlines():
                    _, program, *arguments = shlex.split(line)
                    assert program == "python", line
                    printed += self.run([sys.executable, *arguments])
        return printed

    def run(self, command: list[str]) -> str:
        result = subprocess.run(
            command, cwd=self.root, env=self.environment, capture_output=True, text=True, timeout=300
        )
        assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
        return result.stdout + result.stderr


def test_a_new_block_size(tmp_path: Path) -> None:
    printed = Copy(tmp_path).follow(section("A new block size"))
    listed = re.findall(r"\(FP16, (64|128), 256, 32, 8\): \S+opt_softmax[ │]+ampere", printed)
    assert set(listed) == {"64", "128"}
    units = (tmp_path / "generated" / "ampere_sm_80").glob("fp16_128_256_32_8_*.cu")
    assert (
        "FlashForwardKernelConfig{.dtype = DType::FP16, .d_head = 128, .B_r = 256" in next(units).read_text()
    )
    assert re.search(r"sm_80[ │]+1[ │]+1\b", printed)
    assert "spills" not in printed
    assert re.search(r"^\d+ passed", printed, re.MULTILINE)


def test_a_new_way_to_load_fragments(tmp_path: Path) -> None:
    copy = Copy(tmp_path)
    printed = copy.follow(section("A new way to load fragments"))
    assert changed_files(tmp_path) == (
        set(),
        {
            "py/flash_helpers/kernels/ampere/forward/config.py",
            "src/include/ampere/gemm.cuh",
            "src/include/common/ptx.cuh",
        },
    )
    assert "three files" in " ".join(PAGE.read_text(encoding="utf-8").split())
    assert re.search(r"sm_80[ │]+2[ │]+2\b", printed)
    assert re.search(r"^\d+ passed", printed, re.MULTILINE)
    read = "import flash_attention_kernels as b; print(b.__file__, b.config_field_names('{}')[-1])"
    file, last = copy.run([sys.executable, "-c", read.format("FlashForwardKernelConfig")]).split()
    assert tmp_path in Path(file).parents  # the binding that was built here
    assert last == "narrow_K_loads"
    if find_tool("cuobjdump"):  # the new field does what it says
        (library,) = (tmp_path / "cache" / STORE / "libraries").rglob("*.so")
        functions = parse_functions(disassemble(library)).values()
        loads = [Counter(i.opcode for i in f if i.name == "LDSM") for f in functions if len(f) > 100]
        wide, narrow = sorted(loads, key=lambda count: count.total())
        assert set(wide) == {"LDSM.16.M88.4", "LDSM.16.MT88.4"}
        assert narrow["LDSM.16.M88.2"] == 2 * (wide["LDSM.16.M88.4"] - narrow["LDSM.16.M88.4"]) > 0
        assert narrow["LDSM.16.MT88.4"] == wide["LDSM.16.MT88.4"]


def changed_files(root: Path) -> tuple[set[str], set[str]]:
    """(new files, changed files) of a copy, but for what is generated or built there."""
    new, changed = set(), set()
    for path in root.rglob("*"):
        name = path.relative_to(root)
        made = {"generated", "__pycache__", ".pytest_cache", "cache", "build"} & set(
            name.parts
        ) or path.suffix == ".so"
        if made or not path.is_file():
            continue
        if not (ROOT / name).is_file():
            new.add(str(name))
        elif (ROOT / name).read_bytes() != path.read_bytes():
            changed.add(str(name))
    return new, changed


def test_a_new_direction_of_a_new_family_is_two_folders_and_one_line(tmp_path: Path) -> None:
    copy = Copy(tmp_path)
    copy.follow(section("The folder", DIRECTION_PAGE))
    new, changed = changed_files(tmp_path)
    assert changed == set()
    assert {name.rpartition("/")[0] for name in new} == {
        "py/flash_helpers/kernels/toy", "py/flash_helpers/kernels/toy/row_sums", "src/include/toy/row_sums",
    }  # fmt: skip
    printed = copy.follow(section("The line", DIRECTION_PAGE))
    assert changed_files(tmp_path) == (new, {"py/flash_helpers/kernels/families.py"})
    registry = "py/flash_helpers/kernels/families.py"
    before, after = ((root / registry).read_text().splitlines() for root in (ROOT, tmp_path))
    assert [line for line in after if line not in before] == ['    "toy.row_sums",']
    assert len(after) == len(before) + 1

    listed = r"\((?:FP16|BF16), (?:64|128), 128\): row_sums\+unrolled[ │]+toy_row_sums"
    assert len(re.findall(listed, printed)) == 4
    assert '#include "toy/row_sums/launcher.cuh"' in printed
    assert "flash::toy::make_record<ToyRowSumsKernelConfig{.dtype = DType::BF16, .d_head = 64, " in printed
    assert printed.splitlines()[-1] == "toy_row_sums toy row_sums 80 128"
    structs = (tmp_path / "src" / "include" / "generated" / "structs.cuh").read_text()
    assert "struct ToyRowSumsKernelConfig {\n    DType dtype;\n    int d_head;" in structs
    (entry,) = (tmp_path / "cache" / STORE / "index").rglob("*.json")
    assert '"direction": "row_sums"' in entry.read_text().replace('\\"', '"')
    refusals = {
        "(BF16, 96, 128): row_sums": "d_head is 96; this family has 64, 128",
        "(BF16, 64, 100): row_sums": "B_r is 100; it must be a multiple of 32 from 32 to 1024",
        "(BF16, 64, 128): row_sums+quick": "the word 'quick' is unknown; allowed: row_sums, unrolled",
        "(BF16, 64, 128): row_sums | causal": "causal: row sums are made without traits",
    }
    program = (
        "from flash_helpers.kernel_selection import parse_kernel\n"
        "for name in NAMES:\n"
        "    try: print(parse_kernel(name).malformed_reason())\n"
        "    except ValueError as error: print(str(error).splitlines()[0])\n"
    )
    lines = copy.run([sys.executable, "-c", program.replace("NAMES", repr(list(refusals)))]).splitlines()
    for line, reason in zip(lines, refusals.values(), strict=True):
        assert reason in line


def test_a_direction_of_an_old_family_is_two_folders_and_one_line(tmp_path: Path) -> None:
    copy = Copy(tmp_path)
    for title in ("The folder", "The line"):
        copy.follow([block for block in section(title, DIRECTION_PAGE) if block[0] == "diff"])
    printed = copy.follow(section("In a family that is there", DIRECTION_PAGE))
    new, changed = changed_files(tmp_path)
    folders = {name.rpartition("/")[0] for name in new}
    assert folders == {"py/flash_helpers/kernels/ampere/row_sums", "src/include/ampere/row_sums"}
    assert changed == {"py/flash_helpers/kernels/families.py"}
    listed = r"\((?:FP16|BF16), (?:64|128), 128\): row_sums\+unrolled[ │]+ampere_row_sums"
    assert len(re.findall(listed, printed)) == 4
    program = (
        "from flash_helpers.kernel_selection import parse_kernel\n"
        "from flash_helpers.kernels.families import DIRECTIONS, FAMILIES, direction_of\n"
        "direction = direction_of(parse_kernel('(BF16, 64, 128): row_sums'))\n"
        "print(direction.label, direction.family is DIRECTIONS[0].family, len(FAMILIES))\n"
    )
    assert copy.run([sys.executable, "-c", program]).split() == ["ampere_row_sums", "True", "2"]
    (entry,) = (tmp_path / "cache" / STORE / "index").rglob("*.json")
    assert "row_sums" in entry.read_text()


def test_a_new_trait_is_as_many_files_as_the_page_says(tmp_path: Path) -> None:
    copy = Copy(tmp_path)
    printed = copy.follow(section("The kernel's side", TRAIT_PAGE))
    new, changed = changed_files(tmp_path)
    assert (new, changed) == (
        set(),
        {
            "py/flash_helpers/kernels/hopper/forward/direction.py",
            "py/flash_helpers/kernels/problem.py",
            "py/flash_helpers/kernels/traits.py",
            "src/include/ampere/forward/softmax.cuh",
        },
    )
    assert "**four**" in TRAIT_PAGE.read_text(encoding="utf-8")
    chosen, *reasons = printed.splitlines()[-2:]
    assert chosen.endswith(" | absolute")
    assert "wg" not in chosen
    assert reasons == ["kernels of the hopper family are not made for absolute"]
    structs = (tmp_path / "src" / "include" / "generated" / "structs.cuh").read_text()
    assert "bool planned = false;\n    bool absolute = false;" in structs
    if find_tool("cuobjdump"):  # the trait does what it says, and costs nothing where it is off
        (library,) = (tmp_path / "cache" / STORE / "libraries").rglob("*.so")
        functions = disassemble(library).split("Function : ")[1:]
        plain, absolute = sorted(len(re.findall(r"\|R\d+\|", text)) for text in functions)  # operands
        assert absolute > plain + 64


@pytest.mark.parametrize(
    ("diff", "message"),
    [
        ("--- a/file\n+++ b/file\n one\n+two\n", "holds these lines 2 times"),
        ("--- a/file\n+++ b/file\n-three\n+two\n", "holds these lines 0 times"),
    ],
)
def test_lines_that_do_not_stand_once_are_shown(diff: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("one\none\n")
    with pytest.raises(AssertionError, match=message):
        apply(diff, tmp_path)
