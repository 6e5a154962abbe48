"""Prompts for end-to-end tests: varied kinds, lengths and scripts.

With OCTAVO_PROMPTS set to a JSON-lines file (gzip or not, a "prompt" in each line), the
tests take theirs from there instead.
"""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

_OWN = [
    "The capital of France is",
    "Once upon a time, in a village at the edge of a dark forest, there lived a clockmaker who",
    "def quicksort(values: list[int]) -> list[int]:\n    ",
    "Q: A train leaves at 9:40 and arrives at 13:05. How long does the journey take?\nA:",
    "Translate into German: The weather is nice today, so let us go to the lake.\n",
    "Write a haiku about autumn rain.\n\n",
    "The three laws of thermodynamics are: first,",
    "SELECT name, COUNT(*) FROM orders",
    "Dear Ms. Alvarez,\n\nThank you for your letter of 3 May. I am writing to",
    "Ingredients: 200 g flour, 2 eggs, 100 ml milk, a pinch of salt.\nMethod:",
    "1, 1, 2, 3, 5, 8, 13,",
    "日本の首都は",
    "Привет! Как тебя зовут? Меня зовут",
    "مرحبا، كيف حالك؟",
    "שלום, מה שלומך היום?",
    "🙂🚀🌍 Emoji summary of the news:",
    "Cafe\u0301 nai\u0308ve re\u0301sume\u0301 —",
    "<html>\n<head>\n<title>",
    "import numpy as np\n\nx = np.linspace(0, 1, 11)\nprint(",
    "To be, or not to be, that is the question:\nWhether 'tis nobler in the mind to suffer",
    "Explain to a child why the sky is blue. Use simple words.",
    "List five uses of a paperclip:\n1.",
    "The mitochondria is the powerhouse of the cell. In plants, the chloroplast",
    "Summarize: The council met on Tuesday to discuss the new bridge. Costs had risen by a "
    "third since the first estimate, and two members asked for a second opinion. After a "
    "long debate the vote was put off until spring. Summary:",
    "A farmer has 17 sheep and all but 9 run away. How many are left?",
    "if (x > 0) {\n    return",
    "In 1969, humans first",
    "Hello",
    "The quick brown fox",
    "Pros and cons of remote work:\n\nPros:\n-",
    "Rewrite in a formal tone: hey, gonna be late, traffic is nuts",
    "Das Wetter in Hamburg ist",
]


def prompts(count: int) -> list[str]:
    """Return this many prompts."""
    source = os.environ.get("OCTAVO_PROMPTS")
    if source is None:
        return _OWN[:count]
    raw = Path(source).read_bytes()
    text = gzip.decompress(raw) if source.endswith(".gz") else raw
    lines = text.decode().splitlines()
    return [json.loads(line)["prompt"] for line in lines[:count]]
