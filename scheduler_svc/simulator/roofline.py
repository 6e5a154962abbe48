"""How long a mixed step takes on accelerators: the slower of memory and arithmetic, per part.

    layers     max(weight bytes / bandwidth, 2 * parameters * tokens / flops)
    decode     max(K/V bytes read / bandwidth, 4 * layers * heads * head_dim * context / flops)
    prefill    max(K/V bytes read / bandwidth, 4 * layers * heads * head_dim * pairs / flops)
    links      2 all-reduces a layer, of tokens * hidden values: ring, 2 (g - 1) / g of the bytes
    moves      swapped bytes / host bandwidth + transfers * their fixed time; copies on the device
    fixed      per step, and per sequence that draws a token

The parts follow one another, as kernels do. Weights are read once for all tokens of a step,
which is why a larger batch is nearly free until arithmetic takes longer. Output logits are
counted as if every token had them, which a prefill has not (below 2% for these models).
Bandwidth, flops and the bytes of K/V are those of all devices together.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler_svc.simulator.hardware import Device
from scheduler_svc.simulator.models import ModelShape
from scheduler_svc.simulator.work import StepSeconds, StepWork, num_pairs

PAPER_BLOCK_OVERHEAD_TOKENS = 4.0
"""At 16 tokens a block the paper's kernel takes 20-26% longer than one over contiguous K/V
(Kwon et al. 2023, section 7.1): 1 + 4 / 16. At 1 token it takes five times as long, which is
the shape of their figure 18: small blocks cannot keep the device's lanes busy."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """Step times of a model on devices.

    Attributes:
        model: shape.
        device: each of them.
        num_gpus: devices that share the model.
        block_size: tokens per block, for attention and for moves.
        block_overhead_tokens: what fetching a block costs attention, in tokens read on top of
            its own; 0 is contiguous K/V.
        cached_read_share: of the K/V that decodes read, what comes from the device's cache as
            another sequence of the step has just read it; 0: all is read from memory.
        transfers_per_block: copies over the host link that a swapped block takes; None: keys
            and values of every layer apart, as in the paper. 1: gathered and copied at once.
        step_seconds: instead of the device's.
    Raises:  ValueError: naming the field that is out of bounds.
    """

    model: ModelShape
    device: Device
    num_gpus: int = 1
    block_size: int = 16
    block_overhead_tokens: float = PAPER_BLOCK_OVERHEAD_TOKENS
    cached_read_share: float = 0.0
    transfers_per_block: int | None = None
    step_seconds: float | None = None
    _weights: float = field(init=False)
    _per_token: float = field(init=False)
    _per_context: float = field(init=False)
    _per_pair: float = field(init=False)
    _per_kv_read: float = field(init=False)
    _link_fixed: float = field(init=False)
    _link_per_token: float = field(init=False)
    _per_swap: float = field(init=False)
    _per_copy: float = field(init=False)
    _fixed: float = field(init=False)

    def __post_init__(self) -> None:
        """Turn the shape into seconds per unit of work."""
        for name, low in (("num_gpus", 1), ("block_size", 1), ("block_overhead_tokens", 0)):
            if getattr(self, name) < low:
                raise ValueError(f"{name} must be at least {low}, got {getattr(self, name)}")
        if not 0 <= self.cached_read_share <= 1:
            raise ValueError(f"cached_read_share must be from 0 to 1, got {self.cached_read_share}")
        model, device, num_gpus = self.model, self.device, self.num_gpus
        bandwidth = device.bandwidth * device.bandwidth_share * num_gpus
        flops = device.flops * device.flops_share * num_gpus
        per_pair_flops = 4 * model.num_layers * model.num_heads * model.head_dim
        kv_read = model.kv_bytes_per_token / bandwidth
        kv_read *= 1 + self.block_overhead_tokens / self.block_size
        block_bytes = self.block_size * model.kv_bytes_per_token
        transfers = self.transfers_per_block
        if transfers is None:
            transfers = 2 * model.num_layers
        ring = 2 * (num_gpus - 1) / num_gpus
        reduced = 2 * model.num_layers * model.hidden_size * model.bytes_per_value
        values = {
            "_weights": model.parameter_bytes / bandwidth,
            "_per_token": 2 * model.num_parameters / flops,
            "_per_context": max(kv_read * (1 - self.cached_read_share), per_pair_flops / flops),
            "_per_pair": per_pair_flops / flops,
            "_per_kv_read": kv_read,
            "_link_fixed": 2 * model.num_layers * device.link_latency if num_gpus > 1 else 0.0,
            "_link_per_token": ring * reduced / device.link_bandwidth,
            # Every device moves its own heads over its own link, all at the same time.
            "_per_swap": block_bytes / num_gpus / device.host_bandwidth
            + transfers * device.transfer_seconds,
            "_per_copy": 2 * block_bytes / bandwidth,
            "_fixed": device.step_seconds if self.step_seconds is None else self.step_seconds,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def seconds(self, work: StepWork) -> StepSeconds:
        """Say how long a step takes."""
        num_tokens = work.num_decodes
        total = self._fixed + work.num_sampled * self.device.sequence_seconds
        total += work.decode_context * self._per_context
        if work.prefills:
            num_tokens += sum(count for _, count in work.prefills)
            num_read = sum(first + count for first, count in work.prefills)
            total += max(num_read * self._per_kv_read, num_pairs(work.prefills) * self._per_pair)
        if num_tokens:
            total += max(self._weights, num_tokens * self._per_token)
            total += self._link_fixed + num_tokens * self._link_per_token
        move = 0.0
        if work.num_swapped_blocks:
            move = work.num_swapped_blocks * self._per_swap
        if work.num_copied_blocks:
            total += work.num_copied_blocks * self._per_copy
        return StepSeconds(total + move, move)
