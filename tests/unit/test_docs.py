"""The pages are true: every setting is documented, every link leads somewhere, every command shown exists."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def test_the_page_of_settings_is_current_and_complete() -> None:
    spec = importlib.util.spec_from_file_location("make_settings", ROOT / "docs" / "make_settings.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = module.page()
    assert (ROOT / "docs" / "settings.md").read_text(encoding="utf-8") == page, "run: python docs/make_settings.py"
    assert not [line for line in page.splitlines() if line.endswith("|  |")], "a setting has no meaning"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_and_options_that_are_shown_exist(page: Path) -> None:
    shown = set(re.findall(r"bridge-rl ([a-z]+)((?: [^`\n#]*)?)", page.read_text(encoding="utf-8")))
    for name, rest in shown:
        words = [name, *re.findall(r"^ ([a-z]+)", rest)] if name == "image" else [name]
        done = subprocess.run(
            [sys.executable, "-m", "bridge", *words, "--help"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{page.name}: bridge-rl {name}"
        for option in re.findall(r"(?<=\s)--[a-z-]+", rest):
            assert option in done.stdout, f"{page.name}: bridge-rl {name} {option}"


def test_make_targets_that_are_shown_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for page in PAGES:
        for target in re.findall(r"`?make ([a-z-]+)`", page.read_text(encoding="utf-8")):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page.name}: make {target}"
