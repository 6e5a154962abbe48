"""What changes logits before they become probabilities, and what is read from them.

Order: logit bias, allowed tokens, stop tokens held back by min_tokens, penalties.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from executor_svc.plan import Position
from executor_svc.rows import Restrictions, RowTable
from executor_svc.transfer import to_device

# Rows whose log-probabilities are in memory at once, as float32 over the vocabulary.
_LOGPROB_ROWS = 64


def adjust(logits: Tensor, sample_rows: Sequence[int], rows: RowTable) -> None:
    """Apply bias, masks and penalties in place.

    Args:
        logits: [num_rows, vocab_size] float32.
        sample_rows: the row that each line belongs to.
        rows: what the rows asked for.
    """
    penalised = []
    for index, row in enumerate(sample_rows):
        restrictions = rows.restrictions.get(row)
        if restrictions is not None:
            state = rows.state[row]
            num_output = int(state["num_tokens"] - state["num_prompt"])
            _restrict(logits[index], restrictions, num_output < state["min_tokens"])
        if rows.state[row]["has_penalties"]:
            penalised.append(index)
    if penalised:
        _penalise(logits, penalised, np.asarray(sample_rows)[penalised], rows)


def _restrict(logits: Tensor, restrictions: Restrictions, hold_back_stops: bool) -> None:
    def index(tokens: np.ndarray) -> Tensor:
        return to_device(tokens, logits.device)

    if restrictions.bias_tokens.size:
        logits.index_add_(
            0,
            index(restrictions.bias_tokens),
            to_device(restrictions.bias_values, logits.device),
        )
    if restrictions.allowed_tokens.size:
        allowed = index(restrictions.allowed_tokens)
        kept = logits[allowed]
        logits.fill_(-torch.inf)
        logits[allowed] = kept
    if hold_back_stops and restrictions.stop_tokens.size:
        logits[index(restrictions.stop_tokens)] = -torch.inf


def _penalise(
    logits: Tensor, places: list[int], penalised_rows: np.ndarray, rows: RowTable
) -> None:
    """Repetition looks at prompt and output, presence and frequency at the output."""
    state = rows.state[penalised_rows]
    device = logits.device
    offsets = np.arange(int(state["num_tokens"].max()))
    known = offsets < state["num_tokens"][:, None]
    output = known & (offsets >= state["num_prompt"][:, None])
    # Padding counts token 0 not at all.
    tokens = np.where(known, rows.tokens[penalised_rows, : len(offsets)], 0).astype(np.int64)
    index = to_device(tokens, device)

    def count(weights: np.ndarray) -> Tensor:
        counts = torch.zeros((len(places), logits.shape[1]), device=device)
        return counts.scatter_add_(1, index, to_device(weights.astype(np.float32), device))

    def column(name: str) -> Tensor:
        return to_device(state[name].astype(np.float32), device)[:, None]

    seen, output_counts = count(known) > 0, count(output)
    lines = logits[places]
    repetition = column("repetition_penalty")
    repeated = torch.where(lines > 0, lines / repetition, lines * repetition)
    lines = torch.where(seen, repeated, lines)
    lines -= column("frequency_penalty") * output_counts
    lines -= column("presence_penalty") * (output_counts > 0)
    logits[places] = lines


def positions(logits: Tensor, chosen: Tensor, num_top: Sequence[int]) -> list[Position]:
    """Log-probabilities of the chosen tokens and of the likeliest ones.

    Args:
        logits: [n, vocab_size].
        chosen: [n] int64.
        num_top: [n] how many of the likeliest to name; impossible ones are left out.
    """
    result: list[Position] = []
    for begin in range(0, len(logits), _LOGPROB_ROWS):
        span = slice(begin, begin + _LOGPROB_ROWS)
        logprobs = torch.log_softmax(logits[span].float(), dim=-1)
        of_chosen = logprobs.gather(1, chosen[span, None])[:, 0].tolist()
        values, tokens = likeliest(logprobs, max(num_top[span]))
        for token, logprob, top, top_tokens, top_values in zip(
            chosen[span].tolist(),
            of_chosen,
            num_top[span],
            tokens.tolist(),
            values.tolist(),
            strict=True,
        ):
            possible = [value for value in top_values[:top] if value > -np.inf]
            result.append(Position(token, logprob, top_tokens[: len(possible)], possible))
    return result


def likeliest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest values of each line, largest first; of equals, lower ids first.

    Args:
        values: [n, vocab_size].
        count: at most vocab_size are returned.
    Returns: values and ids, each [n, count].
    """
    count = min(count, values.shape[1])
    top, ids = values.topk(count, dim=-1)
    if count == 0:
        return top, ids
    # torch.topk says nothing about equals: put those inside in order of their ids ...
    ids, order = ids.sort(dim=-1)
    top, inner = top.gather(1, order).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(1, inner)
    # ... and choose again where some stayed outside.
    crowded = ((values >= top[:, -1:]).sum(dim=-1) > count).nonzero()[:, 0]
    if len(crowded):
        again, again_ids = values[crowded].sort(dim=-1, descending=True, stable=True)
        top[crowded], ids[crowded] = again[:, :count], again_ids[:, :count]
    return top, ids
