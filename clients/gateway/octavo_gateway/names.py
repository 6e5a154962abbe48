"""What the caller calls a field that the scheduler names by its path on the wire."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

_OF_OPENAI = {
    "stopping.include_stop": "include_stop_str_in_output",
    "output.keep_special_tokens": "skip_special_tokens",
    "beam.length_penalty": "length_penalty",
    "beam.early_stopping": "early_stopping",
    "cache.salt": "cache_salt",
}
_GROUPS = ("sampling.", "stopping.", "output.", "beam.")


@dataclass(frozen=True, slots=True)
class FieldNames:
    """The names of one request.

    Attributes:
        prompt: parameter that holds the prompt: "prompt", "prompt[2]" or "messages".
        renamed: path on the wire -> parameter, where this request differs from the rest.
    """

    prompt: str = "prompt"
    renamed: Mapping[str, str] = field(default_factory=dict)

    def of(self, path: str) -> str:
        """Give the parameter of a path, with its indices: "tokens.ids[3]" is "prompt[3]"."""
        base, bracket, rest = path.partition("[")
        return self._base(base) + bracket + rest

    def _base(self, base: str) -> str:
        if base in self.renamed:
            return self.renamed[base]
        if base in ("text", "tokens", "tokens.ids", "chat", "chat.messages"):
            return self.prompt
        if base in _OF_OPENAI:
            return _OF_OPENAI[base]
        for group in _GROUPS:
            if base.startswith(group):
                return base.removeprefix(group)
        return base

    def for_prompt(self, index: int) -> FieldNames:
        """Give the names for one of several prompts."""
        return replace(self, prompt=f"{self.prompt}[{index}]")
