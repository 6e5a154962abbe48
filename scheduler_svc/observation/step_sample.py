"""One step as it was, in a form that costs the loop next to nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from octavo.v1 import admin_pb2


@dataclass(slots=True)
class StepSample:
    """The message of the same name, field for field, before anybody asks for it."""

    step_id: int = 0
    planned_unix_ns: int = 0
    plan_ns: int = 0
    num_decodes: int = 0
    num_chunk_tokens: int = 0
    num_sampled: int = 0
    copied_blocks: Sequence[int] = ()
    swapped_out_blocks: Sequence[int] = ()
    swapped_in_blocks: Sequence[int] = ()
    plan_bytes: int = 0
    wire_ns: int = 0
    queue_ns: int = 0
    idle_ns: int = 0
    prepare_ns: int = 0
    forward_ns: int = 0
    sample_ns: int = 0

    def to_proto(self) -> admin_pb2.StepSample:
        """Write it as a message."""
        return admin_pb2.StepSample(**{f.name: getattr(self, f.name) for f in fields(self)})
