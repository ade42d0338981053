"""For the site: pages from outside of docs/, and a list of the decisions."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
#: Files of the repository by their place in the site.
BROUGHT = {
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "examples/accelerate_ddp.py": "examples/accelerate_ddp.py",
    "examples/lightning_ddp.py": "examples/lightning_ddp.py",
}


def on_files(files: Any, config: Any) -> Any:
    """Add what lies elsewhere."""
    for place, source in BROUGHT.items():
        files.append(File.generated(config, place, content=(ROOT / source).read_text()))
    files.append(File.generated(config, "decisions/index.md", content=decisions()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links to the repository become links inside of the site."""
    if page.file.src_uri == "contributing.md":
        return re.sub(r"\]\(docs/", "](", markdown)
    markdown = re.sub(r"\]\(\.\./CONTRIBUTING\.md", "](contributing.md", markdown)
    return re.sub(r"\]\(\.\./examples/", "](examples/", markdown)


def decisions() -> str:
    """A line for each page of docs/decisions."""
    lines = ["# Decisions", "", "Why things are as they are, oldest first.", ""]
    for path in sorted((ROOT / "docs" / "decisions").glob("0*.md")):
        title = path.read_text().partition("\n")[0].lstrip("# ")
        lines.append(f"- [{title}]({path.name})")
    return "\n".join(lines) + "\n"
