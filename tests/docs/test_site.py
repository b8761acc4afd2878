"""Every Python snippet of the site's pages runs; the site builds without a dead link."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

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
    sources = re.sub(r'"\s*f?"', "", re.sub(r"\{[^{}]*\}", "…", sources))
    rows = re.findall(r"^\| (`.+?`) \|", text, re.MULTILINE)
    quoted = [part for row in rows for message in re.findall(r"`(.+?)`", row) for part in message.split("…")]
    parts = [part.strip() for part in quoted if len(part.strip()) > 8]
    assert len(parts) >= len(rows)
    assert [part for part in parts if part not in sources] == []


def test_the_site_builds(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    pytest.importorskip("material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "api" / "index.html").is_file()
