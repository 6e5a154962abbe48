"""Shapes and setups say what the paper's table 1 says."""

from __future__ import annotations

import pytest

from scheduler_svc.simulator import DEVICES, MODELS, PAPER_SETUPS
from scheduler_svc.simulator.hardware import slots_beside_weights

GIB = 1024**3


@pytest.mark.parametrize(
    ("name", "parameter_gb"), [("opt-13b", 26), ("opt-66b", 132), ("opt-175b", 346)]
)
def test_parameters_take_what_the_paper_says(name: str, parameter_gb: int) -> None:
    """Table 1's parameter sizes, which it rounds."""
    assert MODELS[name].parameter_bytes / 1e9 == pytest.approx(parameter_gb, rel=0.02)


def test_a_token_of_opt_13b_takes_800_kb() -> None:
    """Section 3 of the paper: 2 (key, value) * 5120 * 40 layers * 2 bytes."""
    assert MODELS["opt-13b"].kv_bytes_per_token == 2 * 5120 * 40 * 2


@pytest.mark.parametrize(("name", "kv_gib"), [("opt-13b", 12), ("opt-66b", 21), ("opt-175b", 264)])
def test_slots_fill_the_memory_for_kv(name: str, kv_gib: int) -> None:
    """Table 1's slots times the bytes of a token are its memory for K/V."""
    setup = PAPER_SETUPS[name]
    found = setup.num_slots * setup.model.kv_bytes_per_token / GIB
    assert found == pytest.approx(kv_gib, rel=0.02)


@pytest.mark.parametrize("name", ["opt-13b", "opt-66b", "opt-175b"])
def test_nine_tenths_of_memory_leave_the_papers_slots(name: str) -> None:
    """What fits beside the weights is near what the paper had."""
    setup = PAPER_SETUPS[name]
    found = slots_beside_weights(setup.model, setup.device, setup.num_gpus, 0.9)
    assert found == pytest.approx(setup.num_slots, rel=0.06)


def test_grouped_heads_make_tokens_small() -> None:
    """Llama 3.1 8B has 8 of 32 heads for K/V: 2 * 8 * 128 * 32 layers * 2 bytes."""
    assert MODELS["llama-3.1-8b"].kv_bytes_per_token == 131_072


def test_weights_that_do_not_fit_are_an_error() -> None:
    """The message says how much there is and how much is needed."""
    with pytest.raises(ValueError, match=r"llama-3.1-70b takes 141 GB; 1 x a100-40gb have 38 GB"):
        slots_beside_weights(MODELS["llama-3.1-70b"], DEVICES["a100-40gb"], 1, 0.9)


def test_devices_that_do_not_divide_the_heads_are_an_error() -> None:
    """Tensor parallelism gives whole heads to a device."""
    with pytest.raises(ValueError, match="num_gpus must divide the 8 K/V heads"):
        slots_beside_weights(MODELS["llama-3.1-8b"], DEVICES["h200"], 3, 0.9)
