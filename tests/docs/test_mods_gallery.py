"""The gallery of masks is what its command writes, pictures too; its speeds stand on a result file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import mods_gallery  # noqa: E402

from flash_helpers.benchmark.result_file import ResultFile  # noqa: E402

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def made() -> dict[Path, str]:
    return mods_gallery.written(mods_gallery.RESULTS)


def test_page_and_pictures_are_what_the_command_writes(made: dict[Path, str]) -> None:
    assert [path.name for path, text in made.items() if path.read_text(encoding="utf-8") != text] == []
    assert set(mods_gallery.FIGURES.iterdir()) == {path for path in made if path != mods_gallery.PAGE}


def test_every_function_has_its_section(made: dict[Path, str]) -> None:
    page = made[mods_gallery.PAGE]
    for entry in (*mods_gallery.MASKS, *mods_gallery.SCORES):
        assert f"\n## {entry.title}\n" in page
        assert f"def {entry.function.__name__}(" in page
    assert page.count(".svg)") == len(mods_gallery.MASKS)


def test_speeds_come_from_the_result_file(tmp_path: Path) -> None:
    problem = {
        "dtype": "BF16", "batch": 4, "n_heads": 16, "n_heads_kv": 16, "seq_len_q": 4096, "seq_len_k": 4096,
        "d_head": 128, "causal": True,
    }  # fmt: skip
    times = {"mod": 1.0, "twin": 0.98, "plain": 1.75, "flex": 2.5}
    rows = [
        {
            "implementation": variant, "kind": "kernel", "feature": "causal", "variant": variant,
            "problem": problem, "milliseconds": {"hot": {"median": median}},
            "environment": {"gpu": "NVIDIA H200", "torch": "2.11"},
        }
        for variant, median in times.items()
    ]  # fmt: skip
    path, later = tmp_path / "mods.json", tmp_path / "later.json"
    ResultFile("mods", "some", rows=[*rows, rows[0] | {"feature": "window"}]).save(path)
    ResultFile("mods", "some", rows=[rows[1] | {"feature": "window"}]).save(later)
    found, said = mods_gallery.measured([path, later, tmp_path / "none.json"])
    assert found["causal", "flex"] == 2.5
    assert {variant for feature, variant in found if feature == "window"} == {"twin"}
    assert "(`mods.json`, `later.json`)" in said
    assert "on an H200 in bfloat16: 4 items of 4096 tokens, 16 heads of 128" in said
    causal, tanh = mods_gallery.MASKS[0], mods_gallery.SCORES[3]
    assert mods_gallery.speed(causal, found) == (
        "Its speed: 1.000 ms; the built-in option 0.980 ms; neither mask nor score function 1.750 ms; "
        "compiled flex_attention 2.500 ms."
    )
    assert mods_gallery.speed(tanh, found) == "Its speed: not measured yet."
