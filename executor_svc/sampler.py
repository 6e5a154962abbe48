"""From logits to tokens: greedy, or one counter-based draw per row.

A draw is a race in which every token has a random number of its own (`draws.py`), so a
row's token depends on its own logits and keys only, never on what is sampled beside it,
nor on the rounding that another batch shape brings to the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from octavo_kernels.cpu.build import KernelsUnavailable
from octavo_kernels.cpu.largest import largest
from torch import Tensor

from executor_svc.batch import StepBatch
from executor_svc.draws import exponentials, keys
from executor_svc.logits import adjust, positions
from executor_svc.plan import Position, RowLogprobs
from executor_svc.rows import RowTable
from executor_svc.transfer import to_device

# Sorted values looked at before a whole vocabulary is sorted for top-p.
_NUCLEUS_HEAD = 1024

# Numbers drawn at once, in whole rows: on a CPU what stays in the cache, which is one row
# of a large vocabulary; a GPU wants many, as far as memory goes.
_CPU_NUMBERS, _GPU_NUMBERS = 1 << 16, 1 << 23

# Filtered rows drawn for at once: few numbers as a rule, but it may be all of them.
_FILTERED_ROWS = 16


_COMPILED_DTYPES = {torch.float32, torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Samples:
    """What a step drew; parallel to `StepBatch.sample_rows`, on the logits' device.

    Attributes:
        tokens: [S] int64; 0 where none can be drawn.
        best: [S] float32, the largest logit of each line; only where it is finite could a
            token be drawn, see `row_errors`.
        logprobs: what rows asked for.
    """

    tokens: Tensor
    best: Tensor
    logprobs: Sequence[RowLogprobs]


def sample(logits: Tensor, batch: StepBatch, rows: RowTable) -> Samples:
    """Draw one token for every row that samples; nothing is appended here.

    A GPU is only waited for where log-probabilities are asked for.

    Args:
        logits: [num_kept, vocab_size] of `batch.kept_tokens`.
        batch: the step.
        rows: the rows as they stand before the draw. Tokens that are not settled yet
            (`drawn.py`) do not matter, unless a row has penalties.
    """
    sample_rows: list[int] = batch.sample_rows.tolist()
    prompt = _prompt_positions(logits, batch)
    lines = _lines(logits, batch)
    state = rows.state[batch.sample_rows]
    adjusted = state["has_penalties"].any() or any(row in rows.restrictions for row in sample_rows)
    if adjusted:
        lines = lines.to(torch.float32, copy=True)
        adjust(lines, sample_rows, rows)
    best, tokens = _largest(lines)
    # A NaN anywhere in a line is its maximum too.
    sound = torch.isfinite(best)
    draws = (state["temperature"] > 0) & (state["num_beam_candidates"] == 0)
    if lines.device.type == "cpu":
        draws &= sound.numpy()
    drawing = np.flatnonzero(draws)
    if drawing.size:
        chosen = state[drawing]
        places = to_device(drawing, lines.device)
        tokens[places] = draw(
            lines[places],
            temperature=chosen["temperature"],
            top_k=chosen["top_k"],
            top_p=chosen["top_p"],
            min_p=chosen["min_p"],
            row_keys=keys(chosen["seed"], chosen["sample_index"], chosen["num_tokens"]),
        )
    tokens.masked_fill_(~sound, 0)
    sampled = _sampled_positions(lines, tokens, state, sound, sample_rows)
    return Samples(tokens, best.float(), _by_row(prompt, sampled))


def _largest(lines: Tensor) -> tuple[Tensor, Tensor]:
    """The largest value of each line, or NaN if there is one, and where it stands."""
    if lines.is_cpu and lines.dtype in _COMPILED_DTYPES:
        try:
            return largest(lines)
        except KernelsUnavailable:
            pass
    best, places = lines.max(dim=-1)
    return best, places


def row_errors(
    sample_rows: npt.NDArray[np.int64], best: npt.NDArray[np.float32]
) -> list[tuple[int, str]]:
    """Rows for which no token could be drawn, and why; see `Samples`."""
    unsound = np.flatnonzero(~np.isfinite(best))
    return [(int(sample_rows[place]), _what_is_wrong(best[place])) for place in unsound]


def draw(
    logits: Tensor,
    *,
    temperature: npt.NDArray[np.float64],
    top_k: npt.NDArray[np.int64],
    top_p: npt.NDArray[np.float64],
    min_p: npt.NDArray[np.float64],
    row_keys: npt.NDArray[np.int32],
) -> Tensor:
    """Draw one token per line: temperature, then top-k, top-p, min-p, then the draw.

    Args:
        logits: [n, vocab_size]; of a line whose largest value is not finite, which a CPU
            does not take, any token may come back.
        temperature: [n], above 0.
        top_k: [n], 0 keeps all. Of equal tokens those with lower ids are kept.
        top_p: [n], 1 keeps all.
        min_p: [n], 0 keeps all.
        row_keys: [n, 2], of `draws.keys`.
    Returns: [n] int64, on the logits' device.
    """
    num_lines, vocab_size = logits.shape
    device = logits.device
    tokens = torch.empty(num_lines, dtype=torch.int64, device=device)
    filtered = (top_k > 0) | (top_p < 1) | (min_p > 0)
    step = max(1, (_CPU_NUMBERS if device.type == "cpu" else _GPU_NUMBERS) // vocab_size)
    free = np.flatnonzero(~filtered)
    for places in np.split(free, range(step, len(free), step)):
        if places.size:
            weights = _weights(_pick(logits, places), temperature[places])
            tokens[to_device(places, device)] = _draw_of_all(weights, row_keys[places])
    places = np.flatnonzero(filtered)
    # How many tokens are left only the device knows: a GPU is not asked, it draws of all.
    draw_filtered = _draw_of_few if device.type == "cpu" else _draw_of_all
    if places.size:
        weights = _weights(_pick(logits, places), temperature[places])
        _filter(weights, top_k[places], top_p[places], min_p[places])
        for begin in range(0, len(places), _FILTERED_ROWS):
            some = places[begin : begin + _FILTERED_ROWS]
            tokens[to_device(some, device)] = draw_filtered(
                weights[begin : begin + _FILTERED_ROWS], row_keys[some]
            )
    return tokens


def _draw_of_all(weights: Tensor, row_keys: npt.NDArray[np.int32]) -> Tensor:
    """Draw where every token has a number; one of weight 0 never arrives."""
    device = weights.device
    ids = torch.arange(weights.shape[1], dtype=torch.int32, device=device)
    arrivals = exponentials(ids, to_device(row_keys[:, None], device)).div_(weights)
    if device.type == "cpu":  # numpy finds it many times faster than torch
        return torch.from_numpy(np.asarray(arrivals.numpy().argmin(axis=-1)))
    return arrivals.argmin(dim=-1)


def _draw_of_few(weights: Tensor, row_keys: npt.NDArray[np.int32]) -> Tensor:
    """Draw on a CPU where most tokens weigh nothing: only the others are given numbers."""
    num_lines, vocab_size = weights.shape
    flat = weights.reshape(-1)
    places = torch.from_numpy(np.flatnonzero(flat.numpy() > 0))
    lines = places // vocab_size
    ids = places - lines * vocab_size
    of_places = torch.from_numpy(row_keys)[lines]
    arrivals = exponentials(ids.int(), of_places).div_(flat[places]).numpy()
    ends = np.searchsorted(lines.numpy(), np.arange(num_lines + 1))
    first = [
        begin + int(arrivals[begin:end].argmin())
        for begin, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)
    ]
    return ids[first]


def _pick(logits: Tensor, places: npt.NDArray[np.int64]) -> Tensor:
    """Lines by number; a single one without a copy."""
    if len(places) == 1:
        return logits[places[0] : places[0] + 1]
    return logits[to_device(places, logits.device)]


def _weights(lines: Tensor, temperature: npt.NDArray[np.float64]) -> Tensor:
    """Probabilities times a factor of each line's own: the likeliest token weighs 1."""
    scaled = lines.float() - lines.amax(dim=-1, keepdim=True).float()
    scaled /= to_device(temperature.astype(np.float32), lines.device)[:, None]
    return scaled.exp_()


def _filter(
    weights: Tensor,
    top_k: npt.NDArray[np.int64],
    top_p: npt.NDArray[np.float64],
    min_p: npt.NDArray[np.float64],
) -> None:
    """Zero in place what top-k, then top-p, then min-p leave out."""
    limited = np.flatnonzero((top_k > 0) | (top_p < 1))
    if limited.size:
        places = to_device(limited, weights.device)
        weights[places] = _limit(weights[places], top_k[limited], top_p[limited])
    if (min_p > 0).any():
        floor = to_device(min_p.astype(np.float32), weights.device)[:, None]
        weights.masked_fill_(weights < floor, 0)


def _limit(weights: Tensor, top_k: npt.NDArray[np.int64], top_p: npt.NDArray[np.float64]) -> Tensor:
    """Zero all but the top-k, and of these all but the nucleus of mass p."""
    vocab_size = weights.shape[1]
    on_cpu = weights.device.type == "cpu"
    limit = np.where(top_k > 0, np.minimum(top_k, vocab_size), vocab_size)
    # A GPU sorts everything, rather than be asked whether a part was enough.
    head = max(1, min(vocab_size, _NUCLEUS_HEAD)) if on_cpu else vocab_size
    count, threshold = _nucleus(weights, limit, top_p, head)
    above = weights > threshold
    equal = weights == threshold
    room = count - above.sum(dim=-1, keepdim=True)
    if not on_cpu or (equal.sum(dim=-1, keepdim=True) > room).any():
        equal &= equal.cumsum(dim=-1) <= room
    return weights.masked_fill_(~(above | equal), 0)


def _nucleus(
    weights: Tensor, limit: npt.NDArray[np.int64], top_p: npt.NDArray[np.float64], head: int
) -> tuple[Tensor, Tensor]:
    """How many tokens each line keeps, and the weight of the last of them; both [n, 1].

    The heaviest `head` tokens are sorted; only a line that they do not settle has its
    whole vocabulary sorted.
    """
    device, vocab_size = weights.device, weights.shape[1]
    limits = to_device(limit, device)[:, None]
    mass = to_device(top_p, device)[:, None]
    if head < vocab_size:
        ordered = weights.topk(head, dim=-1).values
    else:
        ordered = weights.sort(dim=-1, descending=True).values
    inside = torch.arange(head, device=device) < limits
    cumulative = torch.where(inside, ordered, 0).cumsum(dim=-1, dtype=torch.float64)
    total = torch.where(
        limits <= head, cumulative[:, -1:], weights.sum(dim=-1, keepdim=True, dtype=torch.float64)
    )
    reached = cumulative >= mass * total
    # Without a nucleus (p = 1) the limit alone counts.
    count = torch.where(
        mass < 1, torch.minimum((~reached).sum(dim=-1, keepdim=True) + 1, limits), limits
    )
    threshold = ordered.gather(1, count.clamp(max=head) - 1)
    if head < vocab_size:
        needs_total = (limits > head) & (limits < vocab_size)
        unsettled = ((count > head) | (needs_total & (mass < 1)))[:, 0].nonzero()[:, 0]
        if len(unsettled):
            host = unsettled.cpu().numpy()
            count[unsettled], threshold[unsettled] = _nucleus(
                weights[unsettled], limit[host], top_p[host], vocab_size
            )
    return count, threshold


def _lines(logits: Tensor, batch: StepBatch) -> Tensor:
    """Logits of the sampling rows, in their order; no copy where they are that already."""
    places = batch.sample_logits
    if len(places) == len(logits) and (places == np.arange(len(places))).all():
        return logits
    return logits.index_select(0, to_device(places, logits.device))


def _sampled_positions(
    lines: Tensor,
    tokens: Tensor,
    state: npt.NDArray[np.void],
    sound: Tensor,
    sample_rows: list[int],
) -> dict[int, Position]:
    """Of the rows that asked: the token drawn and the likeliest ones."""
    num_top = np.maximum(state["num_logprobs"], state["num_beam_candidates"])
    asked = (state["num_logprobs"] >= 0) | (state["num_beam_candidates"] > 0)
    if not asked.any():
        return {}
    telling = np.flatnonzero(asked & sound.cpu().numpy())
    if not telling.size:
        return {}
    places = to_device(telling, lines.device)
    told = positions(lines[places], tokens[places], num_top[telling].tolist())
    return {sample_rows[place]: position for place, position in zip(telling, told, strict=True)}


def _prompt_positions(logits: Tensor, batch: StepBatch) -> dict[int, list[Position]]:
    told = {}
    for span in batch.prompt_spans:
        end = span.first_logits + len(span.targets)
        told[span.row] = positions(
            logits[span.first_logits : end],
            to_device(span.targets, logits.device),
            [span.num_top] * len(span.targets),
        )
    return told


def _by_row(prompt: dict[int, list[Position]], sampled: dict[int, Position]) -> list[RowLogprobs]:
    return [
        RowLogprobs(row, sampled.get(row), prompt.get(row, ()))
        for row in sorted(prompt.keys() | sampled.keys())
    ]


def _what_is_wrong(best: np.float32) -> str:
    if np.isnan(best):
        return "the model computed a logit that is not a number"
    if best > 0:
        return "the model computed an infinite logit"
    return "no token may be drawn: logit_bias, allowed_token_ids or min_tokens exclude all"
