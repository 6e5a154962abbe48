"""What plain transformers says about an output.

Greedy decoding is right exactly if every token is the argmax after all tokens before it
(induction over the output), so one forward pass over prompt and output judges it all.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


@dataclass(frozen=True)
class Difference:
    """The first token that greedy transformers would not have drawn.

    `gap` is how far the drawn token's logit lies below the largest; `scale` is the
    largest logit's magnitude.
    """

    position: int
    gap: float
    scale: float


class Judge:
    """A model in fp32 under eager transformers, without any of Octavo's code."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model.eval()
        # Lengths are forced on both sides, so generate must not stop, nor mask, its eos.
        self.model.generation_config.eos_token_id = None

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt."""
        return list(self.tokenizer(text)["input_ids"])

    @torch.inference_mode()
    def first_difference(self, prompt: list[int], output: list[int]) -> Difference | None:
        """Return where an output stops being greedy, or None."""
        ids = torch.tensor([[*prompt, *output[:-1]]])
        logits = self.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :]
        best = logits.max(dim=-1).values
        drawn = logits[torch.arange(len(output)), torch.tensor(output)]
        wrong = (logits.argmax(dim=-1) != torch.tensor(output)).nonzero().flatten().tolist()
        if not wrong:
            return None
        first = wrong[0]
        return Difference(first, float(best[first] - drawn[first]), float(best[first].abs()))

    @torch.inference_mode()
    def generate(self, prompt: list[int], num_tokens: int, **options: object) -> list[int]:
        """Run transformers' own generate, greedy and past the end of sequence."""
        ids = torch.tensor([prompt])
        result = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
            **options,
        )
        return result[0, len(prompt) :].tolist()
