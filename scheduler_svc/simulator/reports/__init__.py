"""Studies that reproduce the PagedAttention paper, and some that go beyond it.

    study       what a study is given: seed, size, traces, and processes to work in
    systems     the five systems that are compared, run on one workload
    rates       the highest request rate that a system sustains
    findings    what a study returns: figures beside the paper's, claims, series to draw
    render, pages, pictures      Markdown, the sections of a page, PNG

    fig*.py, beyond_*.py         a study each; found by name, registered nowhere

`scheduler_svc.simulator.reproduce` runs them and writes docs/reproduction/.
"""

from __future__ import annotations

import importlib
import pkgutil
import re

from scheduler_svc.simulator.reports.study import Study

_MODULES = re.compile(r"(fig|beyond_)[a-z0-9_]*")


def all_studies() -> list[Study]:
    """Find every study, by the order of their modules' names.

    Raises:  ValueError: if two have one name, or a module has none.
    """
    found: dict[str, Study] = {}
    for module in sorted(each.name for each in pkgutil.iter_modules(__path__)):
        if not _MODULES.fullmatch(module):
            continue
        loaded = importlib.import_module(f"{__name__}.{module}")
        if hasattr(loaded, "STUDIES"):
            studies = tuple(loaded.STUDIES)
        elif hasattr(loaded, "STUDY"):
            studies = (loaded.STUDY,)
        else:
            raise ValueError(f"{module}: must have STUDY or STUDIES")
        for study in studies:
            if study.name in found:
                raise ValueError(f"{module}: there is already a study of the name {study.name!r}")
            found[study.name] = study
    # The paper's before those beyond it, whatever their names.
    return sorted(found.values(), key=lambda each: each.page != "README.md")
