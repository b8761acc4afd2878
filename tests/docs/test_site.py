"""Every Python snippet of the site's pages runs; the site builds without a dead link."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_api_page import ENTRIES

from flash_attention import errors

ROOT = Path(__file__).parents[2]
PAGES = ("index", "choosing", "integrations")


@pytest.mark.parametrize("page", PAGES)
def test_snippets_run(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    snippets = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert snippets
    source = "\n".join(snippets)  # one after the other, as a reader runs them
    exec(compile(source, f"docs/{page}.md", "exec"), {"__name__": "page"})


def test_troubleshooting_quotes_messages_that_exist() -> None:
    """Each fixed part of a quoted message stands in the sources."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    sources = " ".join(
        path.read_text(encoding="utf-8")
        for folder in ("flash_attention", "py")
        for path in (ROOT / folder).rglob("*.py")
    )
    sources = re.sub(r'"\s*f?"', "", re.sub(r"\{[^{}\n]*\}", "…", sources))
    rows = re.findall(r"^\| (`.+?`) \|", text, re.MULTILINE)
    quoted = [part for row in rows for message in re.findall(r"`(.+?)`", row) for part in message.split("…")]
    parts = [part.strip() for part in quoted if len(part.strip()) > 8]
    assert len(parts) >= len(rows)
    assert [part for part in parts if part not in sources] == []


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_has_its_row(name: str) -> None:
    rows = re.findall(
        r"^\| `.+$", (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert any(f"`{name}`" in row for row in rows)


@pytest.mark.parametrize("notebook", sorted(path.name for path in (ROOT / "docs" / "notebooks").glob("*.py")))
def test_notebooks_run_without_a_gpu(notebook: str) -> None:
    path = ROOT / "docs" / "notebooks" / notebook
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        [sys.executable, path], cwd=ROOT, env=hidden, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "skipped: " in result.stdout
    page = (ROOT / "docs" / "notebooks.md").read_text(encoding="utf-8")
    assert f"(notebooks/{notebook})" in page
    assert f'--8<-- "notebooks/{notebook}"' in page


def test_notebooks_are_in_the_percent_format() -> None:
    for path in (ROOT / "docs" / "notebooks").glob("*.py"):
        cells = re.split(r"^# %%", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert cells[0] == ""
        for cell in cells[1:]:
            kind, _, body = cell.partition("\n")
            assert kind in ("", " [markdown]")
            is_text = all(line.startswith("#") for line in body.splitlines() if line)
            assert is_text == (kind == " [markdown]")


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert pages == set(re.findall(r": ([\w/-]+\.md)$", text, re.MULTILINE))


def test_the_site_builds(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    pytest.importorskip("material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    page = (tmp_path / "api" / "index.html").read_text(encoding="utf-8")
    for heading, path in ENTRIES.items():  # an entry that is found, with its text, not a heading alone
        shown = re.split(r'<h\d id="', page.partition(f'id="{path}"')[2], maxsplit=1)[0]
        assert re.search(r'class="doc doc-contents[^"]*">\s*<(p|div|table|pre)\b', shown), heading
    pages = [path for path in tmp_path.rglob("*.html") if path.name != "404.html"]
    assert len(pages) >= 10
    for built in pages:
        text = built.read_text(encoding="utf-8")
        assert 'data-md-color-scheme="slate"' in text, "the dark palette"
        assert "md-source" in text, "the link to the repository"
