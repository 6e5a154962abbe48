"""Devices, and how much of a model's K/V fits beside its weights.

Peaks are the vendors' (NVIDIA A100 and H200 data sheets: memory bandwidth, dense fp16 tensor
throughput, NVLink and PCIe per direction). What of a peak is reached, and the fixed times,
are assumptions, the same for every system that is simulated:

    bandwidth_share   0.85   of the HBM peak, by large reads (STREAM-like kernels reach 85-92%)
    flops_share       0.60   of the tensor peak, by the matrices of a step
    step_seconds      3 ms   host work of a step: scheduling, launches, sampling (A100, 2023);
                      1 ms   on H200, with captured graphs
    link_latency      15 us  an all-reduce of few bytes over NVLink
    transfer_seconds  5 us   one copy over PCIe, before its bytes count

Source of the setups: Kwon et al. (2023), table 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_svc.simulator.models import MODELS, ModelShape

_MIB = 1024**2


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator.

    Attributes:
        name: by which it is asked for.
        memory_bytes: as the driver reports it.
        bandwidth: of its memory, bytes a second, peak.
        flops: dense fp16 or bf16 operations a second, peak.
        link_bandwidth: to its neighbours, bytes a second in one direction, peak.
        host_bandwidth: to host memory, bytes a second in one direction, as reached.
        bandwidth_share: of `bandwidth` that is reached.
        flops_share: of `flops` that is reached.
        step_seconds: of every step, whatever is in it.
        sequence_seconds: of every sequence that draws a token, on top.
        link_latency: seconds of an all-reduce, on top of its bytes.
        transfer_seconds: of one copy over the host link, on top of its bytes.
    """

    name: str
    memory_bytes: int
    bandwidth: float
    flops: float
    link_bandwidth: float
    host_bandwidth: float
    bandwidth_share: float = 0.85
    flops_share: float = 0.60
    step_seconds: float = 3e-3
    sequence_seconds: float = 10e-6
    link_latency: float = 15e-6
    transfer_seconds: float = 5e-6


DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device("a100-40gb", 40_536 * _MIB, 1.555e12, 312e12, 300e9, 25e9),
        Device("a100-80gb", 81_920 * _MIB, 2.039e12, 312e12, 300e9, 25e9),
        Device(
            "h200",
            143_771 * _MIB,
            4.8e12,
            989e12,
            450e9,
            50e9,
            step_seconds=1e-3,
            sequence_seconds=2e-6,
            link_latency=8e-6,
        ),
    )
}
"""Devices by name."""


@dataclass(frozen=True, slots=True)
class Setup:
    """A model on its devices, with the K/V slots that were left.

    Attributes:
        name: of the model, in lower case.
        model: shape.
        device: each of them.
        num_gpus: devices that share one copy of the model (tensor parallel).
        num_slots: tokens of K/V that fit.
    """

    name: str
    model: ModelShape
    device: Device
    num_gpus: int
    num_slots: int


PAPER_SETUPS: dict[str, Setup] = {
    name: Setup(name, MODELS[name], DEVICES[device], num_gpus, num_slots)
    for name, device, num_gpus, num_slots in (
        ("opt-13b", "a100-40gb", 1, 15_700),
        ("llama-13b", "a100-40gb", 1, 15_700),
        ("opt-66b", "a100-40gb", 4, 9_700),
        ("opt-175b", "a100-80gb", 8, 60_100),
    )
}
"""The paper's: 12 GB, 21 GB and 264 GB for K/V (table 1: 15.7K, 9.7K and 60.1K slots)."""


def slots_beside_weights(
    model: ModelShape, device: Device, num_gpus: int, memory_share: float
) -> int:
    """Tokens of K/V that fit into what the weights leave.

    Args:
        memory_share: of the memory that is used at all; 0.9 gives the paper's numbers
            within 5%.
    Raises:  ValueError: if the weights alone do not fit.
    """
    if not 0 < memory_share <= 1:
        raise ValueError(f"memory_share must be above 0 and at most 1, got {memory_share:g}")
    if num_gpus < 1 or model.num_kv_heads % num_gpus:
        raise ValueError(
            f"num_gpus must divide the {model.num_kv_heads} K/V heads of {model.name}, "
            f"got {num_gpus}"
        )
    usable = device.memory_bytes * num_gpus * memory_share
    left = usable - model.parameter_bytes
    if left < model.kv_bytes_per_token:
        raise ValueError(
            f"{model.name} takes {model.parameter_bytes / 1e9:.0f} GB; {num_gpus} x {device.name} "
            f"have {usable / 1e9:.0f} GB at a memory_share of {memory_share:g}"
        )
    return int(left // model.kv_bytes_per_token)
