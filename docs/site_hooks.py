"""Hooks of mkdocs: pages that are made from other files of the checkout, links that leave `docs/`, and the
source of each page beside it, for the programs that read `llms.txt`."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages whose text has another home: glossary, changelog and the list of decisions."""
    contributing = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    glossary = contributing.split("## Glossary\n", 1)[1].split("\n## ", 1)[0]
    for name, text in {
        "glossary.md": f"# Glossary\n{glossary}",
        "changelog.md": (ROOT / "CHANGELOG.md")
        .read_text("utf-8")
        .replace("](docs/adr)", "](adr/index.md)")
        .replace("](docs/", "]("),
        "adr/index.md": decisions(),
    }.items():
        files.append(File.generated(config, name, content=text))
    return files


def decisions() -> str:
    """A table of the decision records: number, title, status."""
    rows = []
    for path in sorted((ROOT / "docs" / "adr").glob("[0-9]*.md")):
        title, *lines = path.read_text("utf-8").splitlines()
        status = next((line for line in lines if line.lower().startswith("status")), "")
        rows.append(f"| [{title.lstrip('# ')}]({path.name}) | {status.partition(':')[2].strip()} |")
    return "\n".join(["# Decisions", "", "| decision | status |", "|---|---|", *rows])


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Pages of the checkout that the site shows under another name, or not at all."""
    text = re.sub(r"\]\((?:\.\./)+CONTRIBUTING\.md#glossary\)", "](glossary.md)", markdown)
    text = re.sub(r"\[([^\]]+)\]\((?:\.\./)+(?:CONTRIBUTING|README|SECURITY)\.md(?:#[^)]*)?\)", r"\1", text)
    source = Path(config.site_dir, page.file.src_uri)
    source.parent.mkdir(parents=True, exist_ok=True)
    source.write_text(text, "utf-8")
    return text
