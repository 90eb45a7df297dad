"""The site of the documentation is built without a warning, and has every page, setting and public function."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from whet.config.base import Config
from whet.config.component import Component
from whet.config.entry_points import EntryPoints
from whet.run.recipe import Recipe

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "docs" / "site.py"


def module():
    spec = importlib.util.spec_from_file_location("docs_site", SCRIPT)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.mark.slow  # test_docs.py follows the links
def test_the_site_is_built_from_all_pages(tmp_path: Path) -> None:
    built = subprocess.run([sys.executable, SCRIPT, tmp_path / "site"], capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stdout + built.stderr
    for page in (ROOT / "docs").rglob("*.md"):
        place = page.relative_to(ROOT).with_suffix("")
        folder = place.parent if page.name == "README.md" else place
        assert (tmp_path / "site" / folder / "index.html").is_file(), page
    python = (tmp_path / "site/reference/python/index.html").read_text()
    assert all(f'id="{name}"' in python for name in module().INTERFACE)
    start = (tmp_path / "site/index.html").read_text()
    assert 'href="docs/getting-started/"' in start
    assert "http://fonts" not in start


def test_every_setting_of_a_recipe_is_on_the_page_of_settings() -> None:
    page = module().settings()
    lines = page.splitlines()
    assert [f"\n`{name}`\n:   " in page for name in Recipe.model_fields] == [True] * len(Recipe.model_fields)
    for group in ("whet.data", "whet.task_sets", "whet.engines", "whet.sinks"):
        component = Component(EntryPoints(group))
        for name in component.registry:
            cls, preset = component.resolve(name, Config)
            heading = f"{{: #{module()._anchor(cls)} }}"
            assert preset is not None or any(line.endswith(heading) for line in lines), name


def test_a_broken_link_ends_the_build(tmp_path: Path) -> None:
    site = module()
    with pytest.raises(SystemExit, match=r"docs/x.md: the link nowhere.md leads nowhere"):
        site._linked("See [this](nowhere.md).", "docs/x.md", set())
    sources: set[str] = set()
    text = site._linked(
        "[a](../whet/api.py#L3) [b](prep.md) `[c](no.md)`\n```\n[d](no.md)\n```\n", "docs/x.md", sources
    )
    assert sources == {"whet/api.py"}
    assert text.startswith("[a](../source/whet/api.py.md#L3) [b](prep.md)")
