"""Sampling settings of a body, under the names that OpenAI's and vLLM's clients send them."""

import secrets
from dataclasses import dataclass

from tlt.errors import RequestError
from tlt.serve.errors import ApiError
from tlt.serve.fields import Fields
from tlt.types import SamplingParams

_SEED_BITS = 63
_HOTTEST = 100.0
_NEUTRAL = {  # fields that would change the answer, and the values that ask for nothing
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "use_beam_search": (False,),
    "min_tokens": (0,),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "response_format": ({"type": "text"},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "prompt_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "logits_processors": ([],),
}


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the completions of one call are drawn."""

    params: SamplingParams
    n: int  # completions per prompt
    seed: int  # the same seed and place in the call give the same tokens


def read_sampling(fields: Fields, max_tokens: int, most: int) -> Sampling:
    """`most` completions per prompt at most. Without a seed, the call draws anew."""
    for name, neutral in _NEUTRAL.items():
        fields.only(name, *neutral)
    n = fields.integer("n", 1, 1, most)
    fields.only("best_of", n)
    try:
        params = SamplingParams(
            temperature=fields.number("temperature", 1.0, 0.0, _HOTTEST),
            top_k=max(0, fields.integer("top_k", 0, -1, 2**31)),
            top_p=fields.number("top_p", 1.0, 0.0, 1.0),
            min_p=fields.number("min_p", 0.0, 0.0, 1.0),
            max_tokens=max_tokens,
            stop=fields.texts("stop"),
            stop_token_ids=fields.tokens("stop_token_ids"),
            ignore_eos=fields.flag("ignore_eos"),
        )
    except RequestError as error:
        raise ApiError(400, str(error), code="invalid_value") from None
    seed = fields.integer("seed", -1, -(2**63)) if fields.has("seed") else secrets.randbits(_SEED_BITS)
    return Sampling(params, n, seed)
