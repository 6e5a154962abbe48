"""What is asked for: lengths drawn from fitted distributions, arrivals, and prompts' tokens.

The paper's data sets are not public as it used them. What is published are mean lengths
(Kwon et al. 2023, figure 11: ShareGPT 161.31 in and 337.99 out, Alpaca 19.31 and 58.45) and
that requests of 2,048 tokens or more were dropped. Lengths are drawn log-normally, with a
spread (sigma, of the logarithm) of 1.0 as `octavo bench` draws them; the spread is chosen, not
published. Requests that are too long are drawn again, and the distribution is stretched so
that the means of what remains are the published ones.

Only equality of tokens matters to a scheduler. A prompt is its prefixes, each filled with
tokens that follow from its id, and then a token that no other prompt has.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

_PAPER_MAX_LEN = 2048
_SHAREGPT_MEANS = (161.31, 337.99)
_ALPACA_MEANS = (19.31, 58.45)
# WMT16 English to German: a sentence and its translation in LLaMA tokens, about.
_WMT_MEANS = (30.0, 40.0)
_WMT_SIGMA = 0.5
_WMT_PREFIX_TOKENS = {1: 80, 5: 341}
# Multi-turn ShareGPT with its history: mean 2,340 tokens and median 1,730, which is a
# log-normal with sigma² = 2 ln(2340 / 1730).
_CHAT_HISTORY_MEAN = 2340.0
_CHAT_HISTORY_SIGMA = 0.777
_CHAT_PROMPT_TOKENS = 1024
_CHAT_OUTPUT_TOKENS = 1024

_PREFIX_ID_BOUND = 1 << 30
_FIRST_OF_PREFIX = 1 << 30
_FIRST_OF_PROMPT = 1 << 31
FIRST_OF_OUTPUT = 3 << 30
_FILLER = 2


class WorkloadError(ValueError):
    """A workload cannot be used; the message names the field and the bound."""


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One request: lengths instead of tokens.

    Attributes:
        arrival: seconds from the start.
        num_prompt: tokens of the prompt.
        num_output: tokens that every sample generates, exactly.
        n: samples of the one prompt.
        beam_width: beams of a search instead of samples; 0 is sampling.
        prefix_ids: what the prompt begins with; equal leading ids are equal tokens.
        prefix_tokens: tokens that each id stands for.
        tenant: whom it is charged to.
        priority: the higher runs first.
    Raises:  WorkloadError.
    """

    arrival: float
    num_prompt: int
    num_output: int
    n: int = 1
    beam_width: int = 0
    prefix_ids: tuple[int, ...] = ()
    prefix_tokens: int = 0
    tenant: str = ""
    priority: int = 0

    def __post_init__(self) -> None:
        """Check the bounds."""
        for name in ("num_prompt", "num_output", "n"):
            if getattr(self, name) < 1:
                raise WorkloadError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.arrival < math.inf:
            raise WorkloadError(f"arrival must be seconds from 0, got {self.arrival}")
        if self.beam_width < 0 or (self.beam_width and self.n > self.beam_width):
            raise WorkloadError(
                f"beam_width must be 0, or at least n ({self.n}), got {self.beam_width}"
            )
        if self.prefix_ids:
            if self.prefix_tokens < 1:
                raise WorkloadError(f"prefix_tokens must be at least 1, got {self.prefix_tokens}")
            low, high = min(self.prefix_ids), max(self.prefix_ids)
            if low < 0 or high >= _PREFIX_ID_BOUND:
                raise WorkloadError(f"prefix_ids must be from 0 to 2^30 - 1, got {low}..{high}")


def prompt_tokens(request: SimRequest, index: int) -> list[int]:
    """Make the tokens of a prompt.

    Args:
        index: of the request; no two may have the same.
    """
    tokens: list[int] = []
    for prefix_id in request.prefix_ids:
        tokens.append(_FIRST_OF_PREFIX + prefix_id)
        tokens += [_FILLER] * (request.prefix_tokens - 1)
        if len(tokens) >= request.num_prompt:
            break
    num_own = request.num_prompt - len(tokens)
    if num_own <= 0:
        del tokens[request.num_prompt :]
        return tokens
    tokens.append(_FIRST_OF_PROMPT + index % _PREFIX_ID_BOUND)
    tokens += [_FILLER] * (num_own - 1)
    return tokens


# -- drawn lengths -----------------------------------------------------------------


def sharegpt(
    num: int,
    *,
    rate: float,
    seed: int,
    sigma: float = 1.0,
    n: int = 1,
    beam_width: int = 0,
    max_len: int = _PAPER_MAX_LEN,
) -> list[SimRequest]:
    """Draw requests with ShareGPT's published mean lengths, at `rate` a second."""
    drawn = _draw(num, _SHAREGPT_MEANS, sigma, max_len, seed)
    return at_rate(with_samples(drawn, n=n, beam_width=beam_width), rate, seed)


def alpaca(
    num: int,
    *,
    rate: float,
    seed: int,
    sigma: float = 1.0,
    n: int = 1,
    beam_width: int = 0,
    max_len: int = _PAPER_MAX_LEN,
) -> list[SimRequest]:
    """Draw requests with Alpaca's published mean lengths, at `rate` a second."""
    drawn = _draw(num, _ALPACA_MEANS, sigma, max_len, seed)
    return at_rate(with_samples(drawn, n=n, beam_width=beam_width), rate, seed)


def wmt(num: int, *, rate: float, seed: int, shots: int = 1) -> list[SimRequest]:
    """Draw translations after a shared prefix of 80 tokens (1 shot) or 341 (5 shots).

    The prefixes' lengths are the paper's (section 6.4); those of the sentences are assumed:
    means of 30 tokens in and 40 out.
    """
    if shots not in _WMT_PREFIX_TOKENS:
        raise WorkloadError(f"shots must be 1 or 5, got {shots}")
    prefix = _WMT_PREFIX_TOKENS[shots]
    drawn = _draw(num, _WMT_MEANS, _WMT_SIGMA, _PAPER_MAX_LEN - prefix, seed)
    return at_rate(
        [
            replace(r, num_prompt=prefix + r.num_prompt, prefix_ids=(shots,), prefix_tokens=prefix)
            for r in drawn
        ],
        rate,
        seed,
    )


def chat(num: int, *, rate: float, seed: int) -> list[SimRequest]:
    """Draw turns of conversations: the last 1,024 tokens of the history, 1,024 out at most.

    As in the paper (section 6.5) nothing is kept between the turns of a conversation.
    """
    draw = random.Random(seed)
    mu_out = _mu(_SHAREGPT_MEANS[1], 1.0)
    mu_in = _mu(_CHAT_HISTORY_MEAN, _CHAT_HISTORY_SIGMA)
    turns = [
        SimRequest(
            0.0,
            min(_CHAT_PROMPT_TOKENS, _whole(draw.lognormvariate(mu_in, _CHAT_HISTORY_SIGMA))),
            min(_CHAT_OUTPUT_TOKENS, _whole(draw.lognormvariate(mu_out, 1.0))),
        )
        for _ in range(num)
    ]
    return at_rate(turns, rate, seed)


def _draw(
    num: int, means: tuple[float, float], sigma: float, max_len: int, seed: int
) -> list[SimRequest]:
    if num < 0:
        raise WorkloadError(f"num must be at least 0, got {num}")
    if not 0 < sigma <= 3:
        raise WorkloadError(f"sigma must be above 0 and at most 3, got {sigma:g}")
    mu_in, mu_out = _fit(means, sigma, max_len)
    draw = random.Random(seed)
    drawn: list[SimRequest] = []
    while len(drawn) < num:
        num_prompt = _whole(draw.lognormvariate(mu_in, sigma))
        num_output = _whole(draw.lognormvariate(mu_out, sigma))
        if num_prompt + num_output < max_len:
            drawn.append(SimRequest(0.0, num_prompt, num_output))
    return drawn


@lru_cache(maxsize=64)
def _fit(means: tuple[float, float], sigma: float, max_len: int) -> tuple[float, float]:
    """Find the log-normals whose means are these once what is too long was dropped."""
    if sum(means) >= max_len / 2:
        raise WorkloadError(f"max_len must be above {2 * sum(means):.0f}, got {max_len}")
    draw = random.Random(0x0C7A)
    points = [(draw.gauss(0, sigma), draw.gauss(0, sigma)) for _ in range(20_000)]
    mus = [_mu(mean, sigma) for mean in means]
    for _ in range(8):
        kept = [
            (a, b)
            for x, y in points
            if (a := _whole(math.exp(mus[0] + x))) + (b := _whole(math.exp(mus[1] + y))) < max_len
        ]
        for side in (0, 1):
            found = sum(pair[side] for pair in kept) / len(kept)
            mus[side] += math.log(means[side] / found)
    return mus[0], mus[1]


def _mu(mean: float, sigma: float) -> float:
    return math.log(mean) - sigma**2 / 2  # a log-normal's mean is exp(mu + sigma²/2)


def _whole(length: float) -> int:
    return max(1, round(length))


# -- changes -----------------------------------------------------------------------


def at_rate(requests: Sequence[SimRequest], rate: float, seed: int) -> list[SimRequest]:
    """Replace the arrivals by a Poisson process of `rate` requests a second."""
    if not 0 < rate < math.inf:
        raise WorkloadError(f"rate must be above 0 requests a second, got {rate}")
    draw = random.Random(seed ^ 0x5EED)  # not the lengths' numbers again
    now, spaced = 0.0, []
    for request in requests:
        now += draw.expovariate(rate)
        spaced.append(replace(request, arrival=now))
    return spaced


def scale_rate(requests: Iterable[SimRequest], factor: float) -> list[SimRequest]:
    """Let them arrive so many times faster."""
    if not 0 < factor < math.inf:
        raise WorkloadError(f"factor must be above 0, got {factor}")
    return [replace(r, arrival=r.arrival / factor) for r in requests]


def capped(
    requests: Iterable[SimRequest],
    *,
    max_prompt: int | None = None,
    max_output: int | None = None,
    max_len: int | None = None,
) -> list[SimRequest]:
    """Cut prompts and outputs down, and drop requests of `max_len` tokens or more."""
    kept = []
    for request in requests:
        cut = replace(
            request,
            num_prompt=min(request.num_prompt, max_prompt or request.num_prompt),
            num_output=min(request.num_output, max_output or request.num_output),
        )
        if max_len is None or cut.num_prompt + cut.num_output < max_len:
            kept.append(cut)
    return kept


def with_samples(
    requests: Iterable[SimRequest], *, n: int = 1, beam_width: int = 0
) -> list[SimRequest]:
    """Ask for n samples each, or for a beam search."""
    return [replace(r, n=n, beam_width=beam_width) for r in requests]
