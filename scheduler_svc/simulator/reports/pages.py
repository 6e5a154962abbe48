"""The pages that people read: written by hand, with a generated section for each study.

A section lies between `<!-- begin NAME -->` and `<!-- end NAME -->`; nothing else of a page is
touched.
"""

from __future__ import annotations

from pathlib import Path

from scheduler_svc.simulator.reports.study import Study

_TITLES = {"README.md": "Reproduction of the paper", "beyond.md": "Beyond the paper"}


class PageError(ValueError):
    """A page cannot be changed; the message says why."""


def put_section(page: str, study: Study, section: str) -> str:
    """Return the page with this section in place of the old one, or at the end.

    Raises:  PageError: if the markers are not one pair.
    """
    begin, end = f"<!-- begin {study.name} -->", f"<!-- end {study.name} -->"
    marked = f"{begin}\n{section.strip()}\n{end}"
    if begin not in page and end not in page:
        return f"{page.rstrip()}\n\n## {study.title}\n\n{marked}\n"
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise PageError(f"{study.page}: must have {begin} once, and {end} once after it")
    head, rest = page.split(begin)
    return head + marked + rest.split(end)[1]


def write_section(folder: Path, study: Study, section: str) -> None:
    """Put a section into its page; a page that is not there is begun."""
    path = folder / study.page
    if path.exists():
        page = path.read_text(encoding="utf-8")
    else:
        page = f"# {_TITLES.get(study.page, study.page)}\n"
    path.write_text(put_section(page, study, section), encoding="utf-8")
