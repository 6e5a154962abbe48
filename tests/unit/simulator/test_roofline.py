"""Step times lie between what the peaks allow and a small multiple of it."""

from __future__ import annotations

import pytest

from scheduler_svc.simulator import DEVICES, MODELS, Roofline, StepWork

A100, H200 = DEVICES["a100-40gb"], DEVICES["h200"]
OPT = MODELS["opt-13b"]


def seconds(roofline: Roofline, work: StepWork) -> float:
    return roofline.seconds(work).forward


def decode(num: int, context: int) -> StepWork:
    """So many sequences that attend to so many tokens each."""
    return StepWork(num, num * context, None, num)


def test_a_decode_reads_the_weights_once() -> None:
    """One sequence: 25.7 GB at 1,555 GB/s is 16.5 ms at best, and no more than twice that."""
    found = seconds(Roofline(OPT, A100), decode(1, 1))
    assert 16.5e-3 < found < 33e-3


def test_a_batch_shares_the_weights() -> None:
    """32 sequences of short contexts take hardly longer than one."""
    roofline = Roofline(OPT, A100)
    assert seconds(roofline, decode(32, 16)) < 1.1 * seconds(roofline, decode(1, 16))


def test_a_prefill_is_bound_by_arithmetic() -> None:
    """2,048 tokens: 2 * 12.85e9 * 2,048 operations at 312 TFLOP/s are 169 ms at best."""
    found = seconds(Roofline(OPT, A100), StepWork(prefills=[(0, 2048)], num_sampled=1))
    assert 0.169 < found < 2.5 * 0.169


def test_a_prompt_in_chunks_takes_no_less_arithmetic() -> None:
    """Four chunks of 512 compute the same pairs; what is more is the fixed time and reading."""
    roofline = Roofline(OPT, A100)
    whole = seconds(roofline, StepWork(prefills=[(0, 2048)]))
    chunks = sum(seconds(roofline, StepWork(prefills=[(i * 512, 512)])) for i in range(4))
    assert whole < chunks < 1.2 * whole


def test_decode_attention_is_bytes_over_bandwidth() -> None:
    """1,000 tokens of OPT-13B are 819 MB: 0.53 ms at the peak."""
    roofline = Roofline(OPT, A100, block_overhead_tokens=0)
    more = seconds(roofline, decode(1, 1001)) - seconds(roofline, decode(1, 1))
    assert 0.527e-3 < more < 1.5 * 0.527e-3


def test_what_the_device_has_in_its_cache_is_not_read_again() -> None:
    """Of decodes; what prompts read is theirs alone."""
    plain, cached = Roofline(OPT, A100), Roofline(OPT, A100, cached_read_share=0.75)

    def attention(roofline: Roofline) -> float:
        return seconds(roofline, decode(8, 1001)) - seconds(roofline, decode(8, 1))

    assert attention(cached) == pytest.approx(attention(plain) / 4)
    prompt = StepWork(prefills=[(512, 512)])
    assert seconds(cached, prompt) == seconds(plain, prompt)
    with pytest.raises(ValueError, match=r"cached_read_share must be from 0 to 1, got 1\.5"):
        Roofline(OPT, A100, cached_read_share=1.5)


def test_blocks_of_16_cost_attention_a_quarter() -> None:
    """The paper: 20-26% over contiguous K/V (section 7.1)."""

    def attention(overhead: float) -> float:
        roofline = Roofline(OPT, A100, block_size=16, block_overhead_tokens=overhead)
        return seconds(roofline, decode(8, 1001)) - seconds(roofline, decode(8, 1))

    assert 1.20 <= attention(4.0) / attention(0.0) <= 1.26


def test_smaller_blocks_read_slower() -> None:
    """The paper's figure 18: single tokens are several times slower than blocks of 16."""
    times = [seconds(Roofline(OPT, A100, block_size=b), decode(64, 1000)) for b in (1, 2, 8, 128)]
    assert times == sorted(times, reverse=True)
    assert times[0] > 1.5 * times[2]


def test_small_blocks_swap_slower() -> None:
    """The same 1,024 tokens: many small copies do not reach the link's bandwidth (figure 19)."""

    def swap(block_size: int) -> float:
        roofline = Roofline(OPT, A100, block_size=block_size)
        return roofline.seconds(StepWork(num_swapped_blocks=1024 // block_size)).move

    assert swap(1) > 5 * swap(16) > 5 * swap(256)
    # 839 MB over 25 GB/s.
    assert swap(256) == pytest.approx(0.0336, rel=0.1)


def test_one_transfer_per_block_swaps_faster() -> None:
    """Copies of all layers at once need fewer transfers."""
    apart = Roofline(OPT, A100).seconds(StepWork(num_swapped_blocks=10)).move
    once = Roofline(OPT, A100, transfers_per_block=1).seconds(StepWork(num_swapped_blocks=10)).move
    assert once < apart


def test_moves_are_part_of_the_step() -> None:
    """A step that swaps takes longer by what it moves."""
    roofline = Roofline(OPT, A100)
    work = decode(4, 100)
    alone = seconds(roofline, work)
    work.num_swapped_blocks = 10
    moving = roofline.seconds(work)
    assert moving.forward == pytest.approx(alone + moving.move)


def test_eight_devices_are_faster_but_not_eight_times() -> None:
    """What is added is the exchange between them."""
    shape = MODELS["llama-3.1-70b"]
    eight, four = Roofline(shape, H200, 8), Roofline(shape, H200, 4)
    work = decode(16, 1000)
    assert seconds(eight, work) < seconds(four, work) < 2 * seconds(eight, work)


@pytest.mark.parametrize("field", ["num_gpus", "block_size"])
def test_a_size_of_nothing_is_an_error(field: str) -> None:
    """The message names the field and the bound."""
    with pytest.raises(ValueError, match=f"{field} must be at least 1, got 0"):
        Roofline(OPT, A100, **{field: 0})
