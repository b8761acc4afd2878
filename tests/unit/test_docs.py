"""What the documents say is there: paths, links, commands, and Python that runs."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from typer.main import get_command

from flash_helpers.cli import app

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in PAGES}

# Folders that quoted paths are relative to: the checkout's, and those that a page's own words name.
BASES = (
    *(
        "",
        "docs",
        "flash_attention",
        "flash_attention/backends",
        "flash_attention/compat/transformers",
        "flash_attention/distributed",
        "py",
        "py/flash_helpers",
        "py/flash_helpers/tune",
    ),
    *("src", "src/include", "src/include/common", "src/include/tma"),
    *(
        f"src/include/{family}{direction}"
        for family in ("ampere", "hopper")
        for direction in ("", "/forward", "/backward")
    ),
)
FILE = re.compile(r"`([\w./-]+\.(?:py|cuh|cpp|hpp|md|json|toml|txt|cu)|[\w./-]+/)`")
MADE_WHERE_USED = {"flash_kernels.cuh", "gradient-grid.json", "ladder/ladder.json"}  # generated, not kept
COMMANDS = get_command(app).commands  # type: ignore[attr-defined]


def found(pattern: str, text: str) -> list[str]:
    return re.findall(pattern, text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", TEXTS)
def test_links_lead_somewhere(page: str) -> None:
    for target in found(r"\]\((?!https?://)([^)#]+)(?:#[^)]*)?\)", TEXTS[page]):
        assert (ROOT / page).parent.joinpath(target).exists(), target


@pytest.mark.parametrize("page", TEXTS)
def test_paths_that_are_named_exist(page: str) -> None:
    for path in FILE.findall(TEXTS[page]):
        known = path in MADE_WHERE_USED or any((ROOT / base / path).exists() for base in BASES)
        assert known, f"{page} names {path}"


@pytest.mark.parametrize("page", TEXTS)
def test_commands_that_are_named_exist(page: str) -> None:
    text = TEXTS[page]
    targets = set(found(r"^([\w-]+):", (ROOT / "Makefile").read_text()))
    assert set(found(r"(?:^|`)make ([\w-]+)", text)) <= targets
    assert set(found(r"(?:^\$? ?|`)(?:python -m flash_attention|flash-attention) (\w+)", text)) <= set(
        COMMANDS
    )
    for module in found(r"python -m (flash_\w+(?:\.\w+)*)", text):
        path = Path(*module.split("."))
        places = [ROOT / base / end for base, end in product(("", "py"), (path.with_suffix(".py"), path))]
        assert any(place.is_file() or (place / "__main__.py").is_file() for place in places), module
    for script in found(r"python ([\w/]+\.py)", text):
        assert (ROOT / script).is_file(), script


SNIPPETS = found(r"^```python\n(.*?)^```", TEXTS["README.md"])


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_every_snippet_of_the_readme_runs(snippet: str) -> None:
    result = subprocess.run([sys.executable, "-c", snippet], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "Warning" not in result.stderr


def test_the_readme_is_read_in_two_minutes() -> None:
    """One example, one table, a summary of each pass, one figure, few words, and links to every page."""
    text = TEXTS["README.md"]
    marker = r"<!-- results: (\w+)(?: of [\w.-]+(?: in \w+)?)? -->"
    results = re.compile(marker + r"(.*?)<!-- end results -->", re.DOTALL)
    assert [name for name, _ in results.findall(text)] == ["ratio", "summary", "summary"]
    assert all("| --- |" in table or "geometric mean" in table for _, table in results.findall(text))
    assert len(SNIPPETS) == 1
    assert len(found(r"^!\[", text)) == 1
    prose = re.sub(r"```.*?```", "", results.sub("", text), flags=re.DOTALL)
    assert len(prose.split()) <= 450
    assert all(f"({page})" in text for page in TEXTS if page != "README.md")


def test_the_page_on_the_command_line_has_all_commands() -> None:
    rows = found(r"^\| `(\w+)` \| `flash_helpers", TEXTS["docs/tools.md"])
    assert set(rows) == set(COMMANDS)
