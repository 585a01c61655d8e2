"""``captions.md``: what each picture in a directory shows, and the command that made it."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from pathlib import Path

from dropmax.errors import RunError
from dropmax.workbench.files import write_atomically

__all__ = ["Captions"]


class Captions:
    """The file, one section per figure; sections of figures made earlier stay.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "captions.md"
    >>> Captions(path).add("noise", "Appendix", "Noise.", [Path("noise.png")], [], "dropmax figures")
    >>> print(path.read_text().splitlines()[2])
    ## noise
    """

    TITLE = "# Figures"

    def __init__(self, path: Path, force: bool = False) -> None:
        self.path = path
        self.sections: dict[str, str] = {}
        try:
            text = path.read_text(encoding="utf-8") if path.exists() else self.TITLE
        except (OSError, UnicodeDecodeError) as error:
            raise RunError(f"cannot read {path}: {error}") from error
        if not text.startswith(self.TITLE) and not force:
            raise RunError(f"{path} is not ours and would be overwritten: use --force, or another --out")
        for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
            self.sections[section.split("\n", 1)[0].strip()] = f"## {section.strip()}\n"

    def add(
        self, name: str, place: str, caption: str, files: Sequence[Path], runs: Sequence[Path], command: str
    ) -> None:
        """Write the section of one more figure. Class names in a caption stay text, whatever they look like."""
        lines = [f"## {name}", "", f"*{place}.* {html.escape(caption, quote=False)}", ""]
        lines += [f"- files: {', '.join(path.name for path in files)}"]
        lines += [f"- runs: {', '.join(map(str, runs))}"] if runs else []
        lines += [f"- command: `{command}`", ""]
        self.sections[name] = "\n".join(lines)
        write_atomically(self.path, f"{self.TITLE}\n\n" + "\n".join(self.sections.values()))
