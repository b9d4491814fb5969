"""OpenAI's own client against the server. Left out where openai is not installed."""

import asyncio
from collections.abc import Iterator

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx")
openai = pytest.importorskip("openai")

from tests.serving import Serving, chatty_policy, config_of, serving  # noqa: E402


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(
        config_of(chatty_policy(tmp_path_factory.mktemp("policy"))), name="tiny", api_key="k", queue=64
    ) as found:
        yield found


@pytest.fixture
def client(server: Serving) -> Iterator["openai.OpenAI"]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="k", max_retries=0) as found:
        yield found


def test_completions_whole_and_streamed(client: "openai.OpenAI") -> None:
    call = {"model": "tiny", "prompt": ["1+2*3=", "4*4="], "n": 2, "seed": 3, "max_tokens": 20, "logprobs": 2}
    found = client.completions.create(**call, echo=True, extra_body={"return_token_ids": True})
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert all(choice.text.startswith(("1+2*3=", "4*4=")[choice.index // 2]) for choice in found.choices)
    first = found.choices[0]
    assert first.logprobs is not None
    assert len(first.logprobs.tokens) == len(first.token_ids) + len(first.prompt_token_ids)
    assert found.usage.completion_tokens == sum(len(choice.token_ids) for choice in found.choices)
    texts = [""] * 4
    for event in client.completions.create(**{**call, "logprobs": 0}, stream=True):
        for choice in event.choices:
            texts[choice.index] += choice.text
    prompts = [prompt for prompt in call["prompt"] for _ in range(2)]
    assert [prompt + text for prompt, text in zip(prompts, texts, strict=True)] == [c.text for c in found.choices]


def test_chats_whole_and_streamed(client: "openai.OpenAI") -> None:
    call = {"model": "tiny", "messages": [{"role": "user", "content": "2+3="}], "seed": 3, "max_completion_tokens": 12}
    found = client.chat.completions.create(**call, logprobs=True, top_logprobs=3)
    message = found.choices[0].message
    assert message.role == "assistant"
    content = found.choices[0].logprobs.content
    assert all(entry.token in [other.token for other in entry.top_logprobs] for entry in content)
    with client.chat.completions.create(**call, stream=True, stream_options={"include_usage": True}) as events:
        chunks = list(events)
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == message.content
    assert chunks[-1].usage.completion_tokens == found.usage.completion_tokens


def test_errors_have_their_classes(server: Serving, client: "openai.OpenAI") -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    with pytest.raises(openai.NotFoundError, match="not served"):
        client.completions.create(model="other", prompt="1")
    with pytest.raises(openai.BadRequestError, match="presence_penalty") as found:
        client.completions.create(model="tiny", prompt="1", presence_penalty=1.0)
    assert found.value.param == "presence_penalty"
    with pytest.raises(openai.AuthenticationError), openai.OpenAI(base_url=server.url + "/v1", api_key="x") as other:
        other.models.list()


def test_many_at_once(server: Serving) -> None:
    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="k") as client:
            calls = (client.completions.create(model="tiny", prompt="1+1=", seed=9, max_tokens=8) for _ in range(32))
            return [found.choices[0].text for found in await asyncio.gather(*calls)]

    assert len(set(asyncio.run(run()))) == 1
