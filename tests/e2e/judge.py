"""What plain transformers says about an output.

Greedy decoding is right exactly if every token is the argmax after all tokens before it
(induction over the output), so one forward pass over prompt and output judges it all.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from executor_svc.draws import exponentials, keys


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
        self._generated: dict[tuple[tuple[int, ...], int, str], list[int]] = {}
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
    def is_drawn(
        self, prompt: list[int], output: list[int], *, seed: int, index: int, temperature: float
    ) -> bool:
        """Say whether each token wins the race of its place.

        The race belongs to (seed, sample index, position); the winner's score is the
        largest, give or take what another order of summation leaves uncertain.
        """
        ids = torch.tensor([[*prompt, *output[:-1]]])
        logits = self.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :]
        count = len(output)
        row_keys = keys(
            np.full(count, seed, np.uint64),
            np.full(count, index, np.int64),
            np.arange(len(prompt), len(prompt) + count, dtype=np.int64),
        )
        ids_of_all = torch.arange(logits.shape[-1], dtype=torch.int32)
        noise = exponentials(ids_of_all, torch.from_numpy(row_keys[:, None]))
        scores = logits / temperature - noise.log()
        drawn = scores[torch.arange(count), torch.tensor(output)]
        return bool((drawn >= scores.max(dim=-1).values - 1e-3).all())

    @torch.inference_mode()
    def generate(self, prompt: list[int], num_tokens: int, **options: object) -> list[int]:
        """Run transformers' own generate, without sampling and past the end of sequence."""
        key = (tuple(prompt), num_tokens, str(options))
        if key not in self._generated:
            self._generated[key] = self._generate(prompt, num_tokens, **options)
        return self._generated[key]

    def _generate(self, prompt: list[int], num_tokens: int, **options: object) -> list[int]:
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
