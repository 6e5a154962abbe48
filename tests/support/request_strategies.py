"""GenerateRequests of every shape, as Hypothesis draws them: sound, at a bound, and wild."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from octavo.v1 import inference_pb2

VOCAB_SIZE = 49_152
_UINT32, _UINT64, _INT32 = 2**32 - 1, 2**64 - 1, 2**31 - 1

_floats = st.floats(width=32)  # with infinities and NaN
_token_ids = st.integers(0, VOCAB_SIZE - 1) | st.sampled_from([VOCAB_SIZE, _UINT32])
_texts = st.text(max_size=40) | st.sampled_from(
    ["", "Hello", "日本の首都は", "🙂🚀", "e\u0301\u0323", "\u202eto the left", "\x00", "a" * 3000]
)


def _number(*usual: float) -> st.SearchStrategy[float]:
    """Mostly a usual value, sometimes any."""
    return st.sampled_from(usual) | _floats


def _count(largest: int, *usual: int) -> st.SearchStrategy[int]:
    return st.sampled_from(usual) | st.integers(0, largest)


def _some(fields: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Any of the fields, with few at once: many would nearly always hold a bad one."""
    names = st.sets(st.sampled_from(sorted(fields)), max_size=4)
    return names.flatmap(lambda chosen: st.fixed_dictionaries({n: fields[n] for n in chosen}))


_sampling = _some(
    {
        "temperature": _number(0.0, 0.7, 1.0, 100.0, 100.1),
        "top_k": _count(_UINT32, 0, 1, 40),
        "top_p": _number(0.0, 0.5, 1.0, 1e-30),
        "min_p": _number(0.0, 0.1, 1.0),
        "repetition_penalty": _number(1.0, 1.2, 0.01, 100.0),
        "presence_penalty": _number(-2.0, 0.0, 2.0),
        "frequency_penalty": _number(-2.0, 0.0, 2.0),
        "seed": _count(_UINT64, 0, 1, _UINT64),
        "logit_bias": st.dictionaries(_token_ids, _number(-100.0, 0.0, 100.0), max_size=4),
        "allowed_token_ids": st.lists(_token_ids, max_size=4),
    }
)
_stopping = st.fixed_dictionaries(
    {"max_tokens": _count(_UINT32, 0, 1, 2, 4, 8)},
    optional={
        "min_tokens": _count(_UINT32, 0, 1, 3),
        "stop": st.lists(_texts | st.sampled_from(["e", " the", "\n"]), max_size=3),
        "include_stop": st.booleans(),
        "stop_token_ids": st.lists(_token_ids, max_size=3),
        "ignore_eos": st.booleans(),
    },
)
_output = _some(
    {
        "omit_text": st.booleans(),
        "logprobs": _count(_UINT32, 0, 1, 20, 21),
        "prompt_logprobs": _count(_UINT32, 0, 1, 20),
        "echo": st.booleans(),
        "keep_special_tokens": st.booleans(),
    }
)
_beam = st.fixed_dictionaries(
    {"width": _count(_UINT32, 2, 3, 4)},
    optional={
        "length_penalty": _number(0.0, 1.0, -10.0, 10.0),
        "early_stopping": st.booleans(),
    },
)
_resumed = st.fixed_dictionaries(
    {"index": _count(_UINT32, 0, 1), "token_ids": st.lists(_token_ids, max_size=5)}
)
_messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool", ""]), "content": _texts}
    ),
    max_size=3,
)
_prompts = st.one_of(
    st.fixed_dictionaries({"text": _texts}),
    st.fixed_dictionaries({"tokens": st.builds(dict, ids=st.lists(_token_ids, max_size=40))}),
    st.fixed_dictionaries({"chat": st.builds(dict, messages=_messages)}),
    st.just({}),
)
_rest = _some(
    {
        "request_id": st.text(max_size=5) | st.just("x" * 129),
        "model": st.sampled_from(["", "gpt-5", "m" * 300]),
        "n": _count(_UINT32, 0, 1, 2, 5),
        "best_of": _count(_UINT32, 0, 1, 3),
        "beam": _beam,
        "priority": st.sampled_from([-100, 0, 100, 101, -_INT32]),
        "tenant": st.text(max_size=5) | st.just("t" * 129),
        "cache": st.fixed_dictionaries({"disable": st.booleans(), "salt": st.text(max_size=5)}),
        "resume": st.lists(_resumed, max_size=2),
    }
)


@st.composite
def requests(draw: st.DrawFn) -> inference_pb2.GenerateRequest:
    """Any request that protobuf can carry."""
    fields = {**draw(_prompts), **draw(_rest), "stopping": draw(_stopping)}
    fields |= {"sampling": draw(_sampling), "output": draw(_output)}
    return inference_pb2.GenerateRequest(**fields)
