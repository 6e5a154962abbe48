"""docs/reference.md is what the protos and the error table say."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
ANCHOR = re.compile(r"\]\(#([^)]+)\)")


@pytest.fixture(scope="module")
def text(root) -> str:
    return (root / "docs" / "reference.md").read_text(encoding="utf-8")


def test_it_is_what_the_sources_generate(root, text, tmp_path):
    """Byte for byte: run `make reference` after a change of a proto or of the errors."""
    fresh = tmp_path / "reference.md"
    script = root / "scripts" / "generate_reference.py"
    subprocess.run([sys.executable, "-P", script, fresh], check=True)
    assert fresh.read_text(encoding="utf-8") == text


def test_its_links_lead_to_its_headings(text):
    """Every type that a field has is on the page."""
    headings = {heading.replace(".", "").lower() for heading in HEADING.findall(text)}
    anchors = set(ANCHOR.findall(text))
    assert {"inferenceservice", "generaterequest", "steperrorkind"} <= anchors
    assert anchors <= headings


@pytest.mark.parametrize(
    "row",
    [
        r"| `temperature` | 1 | float, optional | temperature divides the logits. 0 means greedy. "
        r"Default: 1, or the model's own. | 0 to 100 |",
        r"| `logit_bias` | 9 | map from uint32 to float | ",
        r"| `tokens` | 4 | [TokenIds](#tokenids), *of* prompt | ",
        r"| `Generate` | [GenerateRequest](#generaterequest) | stream of "
        r"[GenerateResponse](#generateresponse) | ",
        r"| `RESOURCE_EXHAUSTED` | `QUEUE_FULL` | `ErrorInfo`, `RetryInfo` | ",
        r"| `INVALID_ARGUMENT` | `INVALID_FIELD` | `ErrorInfo`, `BadRequest` | ",
    ],
)
def test_it_tells_types_bounds_and_details(text, row):
    """A reader needs no proto at hand."""
    assert text.count(f"\n{row}") == 1
