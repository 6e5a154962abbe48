"""POST /tokenize and /detokenize, in the form of vLLM's."""

from __future__ import annotations

from typing import Any

from octavo_client import AsyncClient

from octavo_gateway.errors import ApiError, translated
from octavo_gateway.names import FieldNames
from octavo_gateway.schema import DetokenizeBody, TokenizeBody
from octavo_gateway.served import Served
from octavo_gateway.translate import check_token_ids, messages


async def tokenize(
    client: AsyncClient, served: Served, body: TokenizeBody, api_key: str | None
) -> dict[str, Any]:
    """Give the token ids that a request with this prompt, or these messages, would use.

    Raises:
        ApiError: for what is wrong with the body, or with the call.
    """
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give exactly one of prompt and messages", param="prompt")
    turns = None if body.messages is None else messages(body.messages)
    with translated(FieldNames("prompt" if turns is None else "messages")):
        ids = await client.tokenize(
            body.prompt, messages=turns, model=body.model or "", api_key=api_key
        )
        texts = None
        if body.return_token_strs:
            await served.vocabulary.fetch(ids, api_key)
            texts = [served.vocabulary[token_id].text for token_id in ids]
    return {
        "count": len(ids),
        "max_model_len": served.model.max_model_len,
        "tokens": list(ids),
        "token_strs": texts,
    }


async def detokenize(
    client: AsyncClient, body: DetokenizeBody, api_key: str | None
) -> dict[str, Any]:
    """Give the text of token ids, special tokens included.

    Raises:
        ApiError: for what is wrong with the body, or with the call.
    """
    check_token_ids("tokens", body.tokens)
    with translated(FieldNames(renamed={"token_ids": "tokens"})):
        text = await client.detokenize(
            body.tokens, keep_special_tokens=True, model=body.model or "", api_key=api_key
        )
    return {"prompt": text}
