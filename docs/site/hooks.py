"""Builds the site without network: mermaid's script comes from the environment of `make docs`, not from a CDN.

MkDocs calls these functions (https://www.mkdocs.org/user-guide/configuration/#hooks). Without the script diagrams
stay text, so that no page ever fetches one.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

_SCRIPT = "assets/mermaid.min.js"


def _mermaid() -> Path | None:
    """Returns the script that PENSTOCK_DOCS_MERMAID names, if there is one."""
    file = Path(os.environ.get("PENSTOCK_DOCS_MERMAID", ""))
    return file if file.is_file() else None


def on_config(config: Any) -> Any:
    """Adds the script to every page, or leaves fences of diagrams as they are."""
    if _mermaid():
        config.extra_javascript.append(_SCRIPT)
    else:
        config.mdx_configs["pymdownx.superfences"]["custom_fences"] = []
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the script to the site's files."""
    from mkdocs.structure.files import File

    if script := _mermaid():
        files.append(File.generated(config, _SCRIPT, content=script.read_bytes()))
    return files
