"""The clients of verifiers, and of renderers, which prime-rl uses too, against the server. Left out where
they are not installed."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx")
pytest.importorskip("verifiers")
pytest.importorskip("renderers")

from verifiers.v1.clients.client import resolve_client
from verifiers.v1.configs.client import EvalClientConfig, TrainClientConfig
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.types import SamplingConfig

from tests.serving import Serving, chatty_policy, config_of, serving
from tlt.model.weights import load_policy, save_policy

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "2+3="}]}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chatty_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def server(policy: Path) -> Iterator[Serving]:
    with serving(config_of(policy), name="tiny") as found:
        yield found


def answered(config: Any, **sampling: Any) -> Any:
    async def run() -> Any:
        client = resolve_client(config)
        try:
            settings = SamplingConfig(temperature=1.0, max_tokens=12, seed=5, **sampling)
            body = {**BODY, **settings.model_dump(exclude_none=True)}
            return await client.get_response(ChatDialect(), body, settings, session_id="one")
        finally:
            await client.close()

    return asyncio.run(run())


def test_the_train_client_gets_the_tokens_that_were_drawn(server: Serving, policy: Path) -> None:
    config = TrainClientConfig(base_url=server.url + "/v1", renderer_model_name=str(policy))
    found = answered(config)
    prompt = server.post("/tokenize", messages=BODY["messages"])["tokens"]
    call = {"seed": 5, "max_tokens": 12, "logprobs": 1}
    expected = server.post("/inference/v1/generate", token_ids=prompt, sampling_params=call)["choices"][0]
    assert found.tokens.prompt_ids == prompt
    assert found.tokens.completion_ids == expected["token_ids"]
    logprobs = [entry["logprob"] for entry in expected["logprobs"]["content"]]
    assert found.tokens.completion_logprobs == pytest.approx(logprobs, abs=1e-4)


def test_the_eval_client_gets_the_same_text(server: Serving, policy: Path) -> None:
    url = server.url + "/v1"
    found = answered(EvalClientConfig(base_url=url))
    trained = answered(TrainClientConfig(base_url=url, renderer_model_name=str(policy)))
    assert found.message.content == trained.message.content


def test_a_trainers_round_of_weights(server: Serving, policy: Path, tmp_path: Path) -> None:
    """prime-rl's: the model is listed, pause, weights from a directory, resume."""
    model = load_policy(policy)
    model.embed.data.mul_(1.3)
    save_policy(model, tmp_path / "step_1", tokenizer_from=policy)
    assert "tiny" in [entry["id"] for entry in server.http.get("/v1/models").json()["data"]]
    for path in ("/pause?mode=keep&clear_cache=false", "/update_weights", "/resume"):
        body = {"weight_dir": str(tmp_path / "step_1")} if path == "/update_weights" else None
        assert server.http.post(path, json=body).status_code == 200
    config = TrainClientConfig(base_url=server.url + "/v1", renderer_model_name=str(policy))
    assert answered(config).tokens.completion_ids
    assert server.metric("tlt:policy_version") == 1
