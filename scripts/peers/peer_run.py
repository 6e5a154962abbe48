"""What the in-process peers share: the workload in, the model, what came when out.

The output is the part of `octavo bench --json` that `octavo bench compare` reads.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers

STARTED = time.perf_counter()


@dataclass(slots=True)
class Request:
    """One request; times are seconds on time.perf_counter's clock.

    Attributes:
        token_times: when each output token was computed, which is the earliest that any
            client could have seen it.
    """

    id: str
    prompt: list[int]
    num_output_tokens: int
    arrival_seconds: float
    sent_at: float = 0.0
    token_times: list[float] = field(default_factory=list)
    error: str | None = None

    def to_json(self, begin: float) -> dict[str, Any]:
        """The entry of one request; times from the start of the run."""
        last = self.token_times[-1] if self.token_times else self.sent_at
        return {
            "id": self.id,
            "num_prompt_tokens": len(self.prompt),
            "num_wanted_tokens": self.num_output_tokens,
            "num_output_tokens": len(self.token_times),
            "sent_at": self.sent_at - begin,
            "ttft": self.token_times[0] - self.sent_at if self.token_times else None,
            "e2e": last - self.sent_at,
            "gaps": [after - before for before, after in pairwise(self.token_times)],
            "error": self.error,
        }


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The flags that every in-process peer has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--requests", type=Path, required=True, help="the workload")
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--dtype", default="float32", help="[default: float32]")
    parser.add_argument("--threads", type=int, default=2, help="of torch [default: 2]")
    return parser


def read_requests(path: Path) -> list[Request]:
    """Read what `octavo bench compare` wrote."""
    entries = json.loads(path.read_text(encoding="utf-8"))
    return [
        Request(str(entry["id"]), entry["prompt"], entry["out"], entry["arrival"])
        for entry in entries
    ]


def warm_up_request(requests: list[Request]) -> Request:
    """A short one, with the first prompt backwards: nothing of it is left in a prefix cache."""
    return Request("warm-up", requests[0].prompt[::-1], 2, 0.0)


def load_model(options: argparse.Namespace) -> Any:
    """Load the model for inference, without an end token: lengths are forced."""
    torch.set_num_threads(options.threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        options.model, dtype=getattr(torch, options.dtype), attn_implementation="sdpa"
    ).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def write_report(
    requests: list[Request], options: argparse.Namespace, *, ready_at: float, begin: float
) -> None:
    """Print everything as one JSON value."""
    report = {
        "server": {
            "model": options.model.name,
            "dtype": options.dtype,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
        },
        "process": {"ready_seconds": ready_at - STARTED, "peak_rss_bytes": _peak_rss_bytes()},
        "requests": [request.to_json(begin) for request in requests],
    }
    json.dump(report, sys.stdout)


def _peak_rss_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return next(
        int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM")
    )
