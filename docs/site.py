"""Builds the site of the documentation: ``make docs``, or ``python docs/site.py OUT``.

Its pages are README, CONTRIBUTING and the files of this folder. Added are the source files that they link to, every
setting (generated from the classes of the recipe), and the Python interface (from its docstrings). A link that leads
nowhere ends the build.
"""

import json
import os
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args

from whet.config import Component, Config
from whet.config.component import ComponentError
from whet.config.documented import documentation
from whet.config.words import describe
from whet.run.recipe import Recipe

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)]*)?\)")
CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
LANGUAGES = {".py": "python", ".yaml": "yaml", ".sh": "bash", ".md": "markdown", ".jinja": "jinja"}

SETTINGS = """[project]
site_name = "whet"
site_description = "Sharpen language models after pretraining"
docs_dir = "pages"
site_dir = "site"
nav = {nav}

[project.theme]
features = ["content.code.copy", "navigation.footer", "navigation.sections", "navigation.top", "search.highlight"]
font = false
palette = [
  {{media = "(prefers-color-scheme: light)", scheme = "default", toggle = {{icon = "lucide/sun", name = "Dark"}}}},
  {{media = "(prefers-color-scheme: dark)", scheme = "slate", toggle = {{icon = "lucide/moon", name = "Light"}}}},
]

[project.markdown_extensions]
attr_list = {{}}
def_list = {{}}
tables = {{}}
toc.permalink = true
pymdownx.highlight = {{}}
pymdownx.superfences = {{}}

[project.plugins.mkdocstrings.handlers.python]
paths = ["{root}"]

[project.plugins.mkdocstrings.handlers.python.options]
show_root_heading = true
show_root_full_path = false
show_source = false
show_signature_annotations = true
separate_signature = true
heading_level = 2
"""

PYTHON = """# Python interface

How these are used: [Python](../docs/python.md), [extending](../docs/extending.md).

{names}
"""
INTERFACE = (
    *(f"whet.api.{name}" for name in ("train", "start", "resume", "open", "read", "result")),
    "whet.run.policy.Policy", "whet.show.result.Result", "whet.tasks.base.TaskSet", "whet.tasks.base.Environment",
    "whet.core.types.Task", "whet.core.types.Message", "whet.losses.base.Loss", "whet.algorithms.base.Algorithm",
    "whet.engines.base.Engine", "whet.metrics.sinks.base.Sink",
)  # fmt: skip


def build(out: Path) -> None:
    """Write the site into ``out``. Exits with a message where a link is broken."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        pages = folder / "pages"
        sources = set[str]()
        for page in ("README.md", "CONTRIBUTING.md", *_names("docs", "*.md")):
            _write(pages / _page(page), _linked((ROOT / page).read_text(encoding="utf-8"), page, sources))
        for picture in _names("docs", "*.png"):
            (pages / picture).parent.mkdir(parents=True, exist_ok=True)
            (pages / picture).write_bytes((ROOT / picture).read_bytes())
        for source in sorted(sources):
            _write(pages / f"source/{source}.md", _source(source))
        _write(pages / "reference/settings.md", settings())
        _write(pages / "reference/python.md", PYTHON.format(names="\n\n".join(f"::: {name}" for name in INTERFACE)))
        (folder / "zensical.toml").write_text(SETTINGS.format(nav=_navigation(), root=ROOT), encoding="utf-8")
        command = [str(Path(sys.executable).parent / "zensical"), "build", "--strict", "--clean"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env={**os.environ, "NO_COLOR": "1"})
        if done.returncode:
            sys.exit(f"the site was not built:\n{done.stdout}{done.stderr}")
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(folder / "site", out)


def settings() -> str:
    """Return the page of all settings: a list for the recipe, for each section, and for each type of a component."""
    lines = [
        "# Every setting",
        "",
        "Generated from the classes. `whet show RECIPE --explain KEY` prints one of them.",
        "",
    ]
    titles: dict[type[Config], str] = {Recipe: "The recipe"}  # in the order in which they are met
    for cls in _growing(titles):
        about = (cls.__doc__ or "").strip().split("\n\n")[0]
        lines += [f"## {titles[cls]} {{: #{_anchor(cls)} }}", "", " ".join(about.split()).replace("``", "`"), ""]
        for name, field in cls.model_fields.items():
            kind = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
            links = []
            for title, nested in _nested(name, kind):
                titles.setdefault(nested, title)
                links.append(f"[{title}](#{_anchor(nested)})")
            values = f"see {', '.join(links)}" if links else describe(kind)
            default = "required"
            if not field.is_required():
                default = f"`{_short(field.get_default(call_default_factory=True))}` by default"
            description = documentation(cls, name).replace("``", "`")
            lines += [f"`{name}`", f":   {values}; {default}. {description}", ""]
        lines.append("")
    return "\n".join(lines)


def _growing(titles: dict[type[Config], str]) -> Iterator[type[Config]]:
    """Yield the keys, also keys that are added while the caller works."""
    done = 0
    while done < len(titles):
        yield list(titles)[done]
        done += 1


def _nested(key: str, annotation: Any) -> Iterator[tuple[str, type[Config]]]:
    """Yield the settings that a value of this type may have, with a title: sections, and the types of components."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        yield f"{key} ({annotation.__name__})", annotation
    members = [*get_args(annotation), *getattr(annotation, "__metadata__", ())]
    component = next((member for member in members if isinstance(member, Component)), None)
    if component is None:
        for member in members:
            yield from _nested(key, member)
        return
    for name in component.registry:
        try:
            cls, preset = component.resolve(name)
        except ComponentError:
            continue  # its package is not installed
        if preset is None:
            yield f"{key}: {name}", cls


def _linked(text: str, page: str, sources: set[str]) -> str:
    """Return a page whose links to source files lead to pages of these; their names are added to ``sources``."""

    def target(match: re.Match[str]) -> str:
        link, anchor = match[2], match[3] or ""
        if "://" in link or link.startswith("mailto:"):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
        if not (ROOT / path).exists():
            sys.exit(f"{page}: the link {link} leads nowhere")
        if not (path.startswith("docs/") or path in ("README.md", "CONTRIBUTING.md")):
            sources.add(path)
            path = f"source/{path}.md"
        return f"{match[1]}{posixpath.relpath(_page(path), posixpath.dirname(_page(page)) or '.')}{anchor})"

    parts, end = [], 0
    for code in CODE.finditer(text):
        parts += [LINK.sub(target, text[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, LINK.sub(target, text[end:])])


def _source(name: str) -> str:
    path = ROOT / name
    if path.is_dir():
        files = [file for file in sorted(path.rglob("*")) if file.suffix in LANGUAGES]
        return f"# {name}\n\n" + "".join(f"- `{file.relative_to(ROOT)}`\n" for file in files)
    return f"# {name}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text(encoding='utf-8')}\n````\n"


def _navigation() -> str:
    """Return the menu: the sections of docs/README.md with the pages that they link to."""
    sections = re.split(r"^## ", (ROOT / "docs/README.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    menu = {"whet": ["index.md"]}
    for section in sections:
        title, _, body = section.partition("\n")
        links = [link for _, link, _ in LINK.findall(body) if link.endswith(".md") and not link.startswith("..")]
        menu[title] = [f"docs/{link}" for link in dict.fromkeys(links)]
    menu["Reference"] = ["reference/settings.md", "reference/python.md"]
    return "[" + ", ".join(f"{{{json.dumps(title)} = {json.dumps(pages)}}}" for title, pages in menu.items()) + "]"


def _names(folder: str, pattern: str) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in sorted((ROOT / folder).rglob(pattern))]


def _page(name: str) -> str:
    return re.sub(r"(^|/)README\.md$", r"\1index.md", name)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _short(value: Any) -> str:
    if isinstance(value, Config):
        return type(value).__name__
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value) or "''"
    return text if len(text) <= 40 else f"{text[:37]}..."


def _anchor(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}".replace(".", "-").lower()


if __name__ == "__main__":
    build(Path(sys.argv[1] if len(sys.argv) > 1 else "build/site").absolute())
