"""Run a workload through transformers' own continuous batching, each request at its time."""

from __future__ import annotations

import time
from typing import Any

import peer_run
from transformers import GenerationConfig
from transformers.generation import ContinuousBatchingConfig

_NO_TOKEN = -1  # as the end token: no request ends before its length


def run(manager: Any, requests: list[peer_run.Request]) -> float:
    """Send each request at its arrival, collect what came; return when the run began."""
    begin = time.perf_counter()
    by_id = {request.id: request for request in requests}
    for request in sorted(requests, key=lambda each: each.arrival_seconds):
        time.sleep(max(0.0, begin + request.arrival_seconds - time.perf_counter()))
        request.sent_at = time.perf_counter()
        manager.add_request(
            request.prompt,
            request_id=request.id,
            max_new_tokens=request.num_output_tokens,
            record_timestamps=True,
            eos_token_id=_NO_TOKEN,
        )
    num_left = len(requests)
    while num_left:
        result = manager.get_result(timeout=1)
        if result is None and not manager.is_running():
            raise SystemExit("continuous batching ended before its requests did")
        if result is not None and result.is_finished():
            by_id[result.request_id].token_times = result.timestamps or []
            by_id[result.request_id].error = result.error
            num_left -= 1
    return begin


def main() -> None:
    """Run; print the report."""
    parser = peer_run.arguments(__doc__)
    parser.add_argument("--page-size", type=int, default=256, help="tokens [default: 256]")
    parser.add_argument(
        "--max-batch-tokens", type=int, default=512, help="tokens of a step [default: 512]"
    )
    options = parser.parse_args()
    requests = peer_run.read_requests(options.requests)
    model = peer_run.load_model(options)
    pages = [
        -(-(len(request.prompt) + request.num_output_tokens) // options.page_size)
        for request in requests
    ]
    config = ContinuousBatchingConfig(
        page_size=options.page_size,
        num_blocks=sum(pages) + 1,  # room for all at once: nothing is ever evicted
        max_batch_tokens=options.max_batch_tokens,
        max_requests_per_batch=len(requests),
    )
    generation = GenerationConfig(do_sample=False, eos_token_id=_NO_TOKEN, pad_token_id=0)
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=config
    ) as manager:
        ready_at = time.perf_counter()
        run(manager, [peer_run.warm_up_request(requests)])
        begin = run(manager, requests)
    peer_run.write_report(requests, options, ready_at=ready_at, begin=begin)


if __name__ == "__main__":
    main()
