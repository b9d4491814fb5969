"""Request bodies: typed fields, sampling settings under OpenAI's and vLLM's names, and errors in OpenAI's form.

Each field is read once with its type and bounds; a value of another type is refused by name, and null means absent.
Fields that nothing reads are ignored, as in vLLM. Fields that would change the completion and are not supported are
refused (`only`).
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tlt.errors import RequestError, TltError, shown
from tlt.types import SamplingParams

_INT64 = 2**63
_SEED_BITS = 63
_MAX_TEMPERATURE = 100.0
_ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_NEUTRAL = {  # fields that would change the completion, and the values that ask for nothing
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


# ---- errors


class ApiError(TltError):
    """Answered with this status. `param` is the field at fault; `code` a word for programs."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        kind = _ERROR_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def refused(param: str, message: str) -> ApiError:
    """A field whose value cannot be taken."""
    return ApiError(400, f"{param}: {message}", param=param, code="invalid_value")


# ---- fields


class Fields:
    def __init__(self, body: Mapping[str, Any], prefix: str = "", size: int = 0) -> None:
        """`prefix`: of names in messages; `size`: of the body in bytes."""
        self._body, self._prefix, self.size = body, prefix, size

    def name(self, name: str) -> str:
        return self._prefix + name

    def has(self, name: str) -> bool:
        return self._body.get(name) is not None

    def raw(self, name: str) -> Any:
        return self._body.get(name)

    def integer(self, name: str, default: int, low: int = 0, high: int = _INT64 - 1) -> int:
        value = self._body.get(name)
        if value is None:
            return default
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not int or not low <= value <= high:
            raise refused(self.name(name), f"{shown(value)} is no integer from {low} to {high}")
        return value

    def number(self, name: str, default: float, low: float, high: float) -> float:
        value = self._body.get(name)
        if value is None:
            return default
        if type(value) not in (int, float) or not low <= value <= high:
            raise refused(self.name(name), f"{shown(value)} is no number from {low:g} to {high:g}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._body.get(name)
        if value is None:
            return default
        if type(value) is not bool:
            raise refused(self.name(name), f"{shown(value)} is neither true nor false")
        return value

    def text(self, name: str, default: str = "") -> str:
        value = self._body.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise refused(self.name(name), f"{shown(value)} is no text")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A text or a list of texts."""
        value = self._body.get(name)
        if value is None:
            return ()
        found = [value] if isinstance(value, str) else value
        if not isinstance(found, list) or not all(isinstance(text, str) and text for text in found):
            raise refused(self.name(name), f"{shown(value)} is neither a text nor a list of texts")
        return tuple(found)

    def tokens(self, name: str) -> tuple[int, ...]:
        value = self._body.get(name)
        if value is None:
            return ()
        if not is_tokens(value):
            raise refused(self.name(name), f"{shown(value)} is no list of token ids")
        return tuple(value)

    def object(self, name: str) -> Mapping[str, Any]:
        value = self._body.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise refused(self.name(name), f"{shown(value)} is no object")
        return value

    def objects(self, name: str) -> list[dict[str, Any]]:
        value = self._body.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise refused(self.name(name), f"{shown(value)} is no list of objects")
        return value

    def only(self, name: str, *accepted: Any, why: str = "it would change the completion") -> None:
        """Refuses a field that is not supported, unless its value asks for nothing."""
        value = self._body.get(name)
        if value is not None and value not in accepted:
            raise refused(self.name(name), f"{shown(value)} is not supported, and {why}; leave it out")


def is_tokens(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < _INT64 for item in value)


# ---- sampling


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
            temperature=fields.number("temperature", 1.0, 0.0, _MAX_TEMPERATURE),
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
