"""The Chinese pages: what they were translated from, the switch of languages, and the search.

A Chinese page has a comment with the path of its English page and a hash of that page's text. When
the English text has changed since, building the site names the page, and fails for a release
(RELEASE=1).

    python docs/_ext/translations.py                  # names what has changed
    python docs/_ext/translations.py --accept FILE... # the translation says what the text says now
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.util.typing import ExtensionMetadata

DOCS = Path(__file__).parents[1]
ROOT = DOCS.parent
_HEAD = re.compile(r"^<!-- english: (\S+) (\w+)", re.M)
_CHINESE = r"\u3400-\u4dbf\u4e00-\u9fff"


def translations() -> list[Path]:
    return [ROOT / "README.zh.md", *sorted((DOCS / "zh").glob("*.md"))]


def english_of(page: Path) -> Path:
    return (page.parent / _head(page)[0]).resolve()


def link_to_english(page: Path) -> str:
    return _head(page)[0]


def _head(page: Path) -> tuple[str, str]:
    found = _HEAD.search(page.read_text(encoding="utf-8"))
    if found is None:
        raise ValueError(f"{page}: expected a comment 'english: PATH HASH'")
    return found[1], found[2]


def digest(english: Path) -> str:
    return hashlib.sha256(english.read_bytes()).hexdigest()[:12]


def stale() -> Iterator[Path]:
    """Pages whose English text has changed since it was translated."""
    for page in translations():
        if _head(page)[1] != digest(english_of(page)):
            yield page


def accept(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    path, old = _head(page)
    new = text.replace(f"{path} {old}", f"{path} {digest(english_of(page))}", 1)
    page.write_text(new, encoding="utf-8")


def words(text: str) -> list[str]:
    """The words of an index: in Chinese, every two neighbouring characters."""
    found = []
    for word in re.findall(rf"[{_CHINESE}]+|[^\W{_CHINESE}]+", text):
        pairs = [word[i : i + 2] for i in range(len(word) - 1)]
        found += pairs if pairs and re.match(rf"[{_CHINESE}]", word) else [word]
    return found


# The same for the words of a query, in the browser.
_SPLIT_QUERY = r"""
var splitQuery = (query) =>
  query
    .split(/([\u3400-\u4dbf\u4e00-\u9fff]+)|[^\p{Letter}\p{Number}_\p{Emoji_Presentation}]+/gu)
    .filter((word) => word)
    .flatMap((word) =>
      /^[\u3400-\u4dbf\u4e00-\u9fff]{2}/.test(word)
        ? Array.from(word.slice(1), (_, i) => word.slice(i, i + 2))
        : [word]
    );
"""


def _tell(app: Sphinx) -> None:
    from sphinx.util import logging

    for page in stale():
        text = f"{page.relative_to(ROOT)}: {english_of(page).name} has changed since"
        if os.environ.get("RELEASE") == "1":
            logging.getLogger(__name__).warning(text)
        else:
            print(f"note: {text}", file=sys.stderr)


def _add_switch(app: Sphinx, page: str, template: str, context: dict[str, Any], tree: Any) -> None:
    """The other language's page, or its first one."""
    english = {
        english_of(x).relative_to(DOCS).with_suffix("").as_posix(): f"zh/{x.stem}"
        for x in translations()[1:]
    }
    chinese = {zh: en for en, zh in english.items()}
    if page in chinese:
        context["language"] = "zh-CN"
    if context.get("pathto") is not None:
        other = chinese.get(page) or english.get(page, "zh/index")
        context["other_language"] = "English" if page in chinese else "中文"
        context["other_page"] = context["pathto"](other)


def setup(app: Sphinx) -> ExtensionMetadata:
    import sphinx.search
    from sphinx.search.en import SearchEnglish

    class SearchBoth(SearchEnglish):
        js_splitter_code = _SPLIT_QUERY

        def split(self, input: str) -> list[str]:
            return words(input)

    sphinx.search.languages["en"] = SearchBoth
    app.connect("builder-inited", _tell)
    app.connect("html-page-context", _add_switch)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--accept", type=Path, nargs="+", default=[], metavar="FILE")
    for page in parser.parse_args().accept:
        accept(page)
    changed = list(stale())
    for page in changed:
        print(f"{page.relative_to(ROOT)}: {english_of(page).relative_to(ROOT)} has changed since")
    return int(bool(changed))


if __name__ == "__main__":
    sys.exit(main())
