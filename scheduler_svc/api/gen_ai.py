"""What a request's span says: OpenTelemetry's GenAI conventions, version 1.37.

Never what was asked or answered: those are the user's.
"""

from __future__ import annotations

from octavo.v1 import inference_pb2

from scheduler_svc.api.generation import Generation
from scheduler_svc.core.request import Request
from scheduler_svc.observation.spans import Value


def operation(message: inference_pb2.GenerateRequest) -> str:
    """Name what is asked for."""
    return "chat" if message.WhichOneof("prompt") == "chat" else "text_completion"


def asked(
    message: inference_pb2.GenerateRequest, request: Request, model: str
) -> dict[str, Value | None]:
    """Describe a validated request."""
    sampling = request.sampling
    return {
        "gen_ai.operation.name": operation(message),
        "gen_ai.provider.name": "octavo",
        "gen_ai.request.model": message.model or model,
        "gen_ai.request.choice.count": request.n if request.n > 1 else None,
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": float(sampling.top_k) if sampling.top_k else None,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty or None,
        "gen_ai.request.presence_penalty": sampling.presence_penalty or None,
        "gen_ai.usage.input_tokens": len(request.prompt_tokens),
        "octavo.request_id": request.request_id,
        "octavo.tenant": request.tenant or None,
        "octavo.priority": request.priority,
        "octavo.beam_width": request.beam.width if request.beam else None,
        "octavo.resumed_tokens": sum(map(len, request.resumed.values())) or None,
    }


def answered(generation: Generation, model: str) -> dict[str, Value | None]:
    """Describe what came of it, as far as it got."""
    ends = [choice.end for choice in generation.choices if choice.end is not None]
    return {
        "gen_ai.response.id": generation.request.request_id,
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": [end.reason.value for end in ends],
        "gen_ai.usage.output_tokens": generation.num_completion_tokens,
    }
