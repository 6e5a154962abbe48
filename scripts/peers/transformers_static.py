"""Run a workload through transformers' `generate`, in padded batches, in the given order.

All of a batch's requests run until its longest is done; tokens past a request's own length
are thrown away. Prompts are padded on the left.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import peer_run
import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList


class StepTimes(StoppingCriteria):
    """Notes when each step of a batch was done; stops nothing."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(
        self,
        input_ids: torch.Tensor,
        scores: Any,  # noqa: ARG002  # its signature
        **kwargs: Any,  # noqa: ARG002  # its signature
    ) -> torch.Tensor:
        """Called with [batch, length] after each step; returns [batch] of False."""
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def run_batch(model: Any, batch: list[peer_run.Request]) -> None:
    """Generate for one padded batch; note the times of each request's own tokens."""
    width = max(len(request.prompt) for request in batch)
    num_steps = max(request.num_output_tokens for request in batch)
    tokens = torch.zeros(len(batch), width, dtype=torch.long)
    mask = torch.zeros_like(tokens)
    for row, request in enumerate(batch):
        tokens[row, width - len(request.prompt) :] = torch.tensor(request.prompt)
        mask[row, width - len(request.prompt) :] = 1
    steps = StepTimes()
    model.generate(
        tokens,
        attention_mask=mask,
        generation_config=GenerationConfig(
            do_sample=False, max_new_tokens=num_steps, eos_token_id=None, pad_token_id=0
        ),
        stopping_criteria=StoppingCriteriaList([steps]),
    )
    for request in batch:
        request.token_times = steps.times[: request.num_output_tokens]


def main() -> None:
    """Run; print the report."""
    parser = peer_run.arguments(__doc__)
    parser.add_argument("--batch", type=int, default=32, help="requests a batch [default: 32]")
    options = parser.parse_args()
    requests = peer_run.read_requests(options.requests)
    if any(request.arrival_seconds for request in requests):
        sys.exit("static batching has no arrivals: compare with --at-once")
    model = peer_run.load_model(options)
    ready_at = time.perf_counter()
    run_batch(model, [peer_run.warm_up_request(requests)])
    begin = time.perf_counter()
    for request in requests:
        request.sent_at = begin
    for first in range(0, len(requests), options.batch):
        run_batch(model, requests[first : first + options.batch])
    peer_run.write_report(requests, options, ready_at=ready_at, begin=begin)


if __name__ == "__main__":
    main()
