"""The server answers as the engine does, in the forms that clients read, whatever else happens to it."""

import json
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
httpx = pytest.importorskip("httpx")

from safetensors.torch import save  # noqa: E402

import tlt  # noqa: E402
from tests.serving import Serving, chatty_policy, config_of, serving  # noqa: E402
from tlt.model.attention import PackedLayout  # noqa: E402
from tlt.model.weights import hf_tensors, save_policy  # noqa: E402
from tlt.types import SamplingParams  # noqa: E402

PROMPTS = ["1+2*3=", "7-(2+2)=", "5*5="]


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny policy with a chat template."""
    return chatty_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def server(chatty: Path) -> Iterator[Serving]:
    with serving(config_of(chatty), name="tiny") as found:
        yield found


@pytest.fixture
def own(chatty: Path) -> Iterator[Serving]:
    """One whose weights a test may change."""
    with serving(config_of(chatty), name="tiny") as found:
        yield found


# ---- completions


def test_completions_are_those_of_the_engine(server: Serving) -> None:
    """Drawn with the call's seed and the completion's place in the call."""
    with tlt.Engine.open("tiny") as engine:
        params = SamplingParams(max_tokens=30, temperature=1.3)
        expected = engine.generate([prompt for prompt in PROMPTS for _ in range(2)], params, seed=11)
    call = {"prompt": PROMPTS, "n": 2, "seed": 11, "max_tokens": 30, "temperature": 1.3, "logprobs": 0}
    for _ in range(2):
        found = server.post("/v1/completions", **call, return_token_ids=True)
        assert [choice["index"] for choice in found["choices"]] == list(range(6))
        for choice, completion in zip(found["choices"], expected, strict=True):
            assert tuple(choice["token_ids"]) == completion.tokens
            assert tuple(choice["prompt_token_ids"]) == completion.prompt_tokens
            assert choice["text"] == completion.text
            assert choice["logprobs"]["token_logprobs"] == pytest.approx(completion.policy_logprobs, abs=1e-4)
            assert choice["finish_reason"] == {"eos": "stop"}.get(completion.finish_reason, completion.finish_reason)
    written = sum(len(completion.tokens) for completion in expected)
    assert found["usage"]["completion_tokens"] == written


@pytest.mark.parametrize("stop", [[], ["=", "9"], ["+"]])
def test_a_stream_adds_up_to_the_whole(server: Serving, stop: list[str]) -> None:
    call = {"prompt": PROMPTS[:2], "n": 2, "seed": 5, "max_tokens": 40, "temperature": 1.2, "logprobs": 0, "stop": stop}
    whole = server.post("/v1/completions", **call, return_token_ids=True)["choices"]
    options = {"return_token_ids": True, "stream_options": {"include_usage": True}}
    events = server.stream("/v1/completions", **call, **options)
    for index, choice in enumerate(whole):
        parts = [part for event in events for part in event["choices"] if part["index"] == index]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert not any(text in choice["text"] for text in stop)
        assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]
        assert [part.get("prompt_token_ids") for part in parts] == [choice["prompt_token_ids"]] + [None] * (
            len(parts) - 1
        )
        logprobs = [logprob for part in parts for logprob in part["logprobs"]["token_logprobs"]]
        assert logprobs == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-4)
        assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert (parts[-1]["finish_reason"], parts[-1]["stop_reason"]) == (
            choice["finish_reason"],
            choice["stop_reason"],
        )
    assert any(choice["stop_reason"] for choice in whole) == bool(stop)
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in whole)


def test_a_stop_token_ends_a_text_and_is_left_out_of_it(server: Serving) -> None:
    call = {"prompt": PROMPTS[0], "seed": 5, "max_tokens": 20, "temperature": 0.0, "return_token_ids": True}
    plain = server.post("/v1/completions", **call)["choices"][0]
    stop = plain["token_ids"][2]
    (choice,) = server.post("/v1/completions", **call, stop_token_ids=[stop])["choices"]
    assert choice["token_ids"] == plain["token_ids"][:3]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert plain["text"].startswith(choice["text"])
    assert len(choice["text"]) == 2


@torch.no_grad()
@pytest.mark.parametrize("max_tokens", [0, 5])
def test_an_echoed_prompt_is_scored_by_the_policy(server: Serving, max_tokens: int) -> None:
    call = {"prompt": [[5, 6, 7, 8], PROMPTS[0]], "echo": True, "logprobs": 3, "max_tokens": max_tokens, "seed": 2}
    for choice in server.post("/v1/completions", **call, return_token_ids=True, return_tokens_as_token_ids=True)[
        "choices"
    ]:
        tokens = choice["prompt_token_ids"] + choice["token_ids"]
        model = server.served.model
        logits = model.logits(model(torch.tensor(tokens), PackedLayout.from_lengths([len(tokens)])).hidden_TD)
        expected = logits.log_softmax(-1)[:-1]
        found = choice["logprobs"]
        assert found["tokens"] == [f"token_id:{token}" for token in tokens]
        assert found["token_logprobs"][0] is None
        own = expected.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()
        assert found["token_logprobs"][1:] == pytest.approx(own, abs=1e-4)
        for row, logprobs, token in zip(found["top_logprobs"][1:], expected, tokens[1:], strict=True):
            likeliest = {f"token_id:{other}" for other in logprobs.topk(3).indices.tolist()}
            assert row.keys() == likeliest | {f"token_id:{token}"}
        assert choice["text"].startswith(server.served.tokenizer.decode(choice["prompt_token_ids"]))


def test_calls_with_one_seed_at_the_same_time_are_answered_alike(server: Serving) -> None:
    found: list[list[int]] = []
    call = {"prompt": PROMPTS[0], "seed": 4, "max_tokens": 40, "ignore_eos": True, "return_token_ids": True}

    def ask() -> None:
        found.append(server.post("/v1/completions", **call)["choices"][0]["token_ids"])

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert all(tokens == found[0] for tokens in found)


# ---- chat and tokens


def test_a_chat_goes_through_the_template_with_its_tools(server: Serving) -> None:
    messages = [{"role": "user", "content": "2+"}, {"role": "user", "content": [{"type": "text", "text": "4*"}]}]
    tools = [{"type": "function", "function": {"name": "f"}}] * 7
    made = server.post("/tokenize", messages=messages, tools=tools, return_token_strs=True)
    assert "".join(made["token_strs"]) == "(2+)(4*)7"
    bare = server.post("/tokenize", messages=messages, add_generation_prompt=False, return_token_strs=True)
    assert "".join(bare["token_strs"]) == "(2+)(4*)="
    call = {"messages": messages, "tools": tools, "seed": 3, "max_tokens": 12, "logprobs": True, "top_logprobs": 2}
    (choice,) = server.post("/v1/chat/completions", **call, return_token_ids=True)["choices"]
    tokens = server.post("/inference/v1/generate", token_ids=made["tokens"], sampling_params={
        "seed": 3, "max_tokens": 12, "logprobs": 0})["choices"][0]  # fmt: skip
    assert choice["token_ids"] == tokens["token_ids"]
    assert choice["message"]["role"] == "assistant"
    entries = tokens["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [f"token_id:{token}" for token in tokens["token_ids"]]
    content = choice["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == pytest.approx([e["logprob"] for e in entries], abs=1e-4)
    assert all(2 <= len(entry["top_logprobs"]) <= 3 for entry in content)
    events = server.stream("/v1/chat/completions", messages=messages, tools=tools, seed=3, max_tokens=12)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta["content"] for delta in deltas) == choice["message"]["content"]


def test_text_becomes_tokens_and_text_again(server: Serving) -> None:
    tokens = server.post("/tokenize", prompt="12+3", add_special_tokens=False)
    assert server.post("/detokenize", tokens=tokens["tokens"]) == {"prompt": "12+3"}
    (model,) = server.http.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("tiny", tokens["max_model_len"])


# ---- what is refused


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/completions", {"prompt": "1", "model": "gpt"}, 404, "model"),
        ("/v1/completions", {}, 400, "prompt"),
        ("/v1/completions", {"prompt": "1", "temperature": -1}, 400, "temperature"),
        ("/v1/completions", {"prompt": "1", "presence_penalty": 0.5}, 400, "presence_penalty"),
        ("/v1/completions", {"prompt": "1", "stream": True, "logprobs": 2}, 400, "top_logprobs"),
        ("/v1/completions", {"prompt": "1", "max_tokens": 100_000}, 400, None),
        ("/v1/completions", {"prompt": "1", "max_tokens": 100_000, "stream": True}, 400, None),
        ("/v1/completions", {"prompt": [[99_999]]}, 400, None),
        ("/v1/completions", {"prompt": "1", "n": 10_000}, 400, "n"),
        ("/v1/chat/completions", {"messages": []}, 400, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "1", "content": [{"type": "image_url"}]}]}, 400, None),
        ("/v1/chat/completions", {"messages": [{"role": "1"}], "tool_choice": "required"}, 400, "tool_choice"),
        ("/v1/chat/completions", {"messages": [{"role": "1"}], "functions": [{"name": "f"}]}, 400, "functions"),
        ("/v1/chat/completions", {"messages": [{"role": "1"}], "top_logprobs": 2}, 400, "top_logprobs"),
        ("/inference/v1/generate", {"token_ids": []}, 400, "token_ids"),
        ("/update_weights", {"weight_dir": "/nowhere"}, 400, "weight_dir"),
        ("/load_lora_adapter", {"lora_name": "a", "lora_path": "/nowhere"}, 400, None),
        ("/pause", {"mode": "soon"}, 400, "mode"),
        ("/nothing", {}, 404, None),
    ],
)
def test_mistakes_are_named_in_openais_form(
    server: Serving, path: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    found, error = server.refused(path, **body)
    assert found == status
    if param is not None:
        assert error["param"] == param


def mutated(dice: random.Random, body: dict[str, Any]) -> bytes:
    """A body that is wrong in one of the ways in which bodies are wrong."""
    strange = [None, -1, 2**70, 1e400, "x" * 50, "", [], {}, [[]], [None], {"a": {"b": []}}, True, 0.5, "\ud800", [-1]]
    raw = json.dumps(body).encode()
    way = dice.randrange(5)
    if way == 0:
        return raw[: dice.randrange(1, len(raw))]
    if way == 1:
        at = dice.randrange(len(raw))
        return raw[:at] + bytes([dice.randrange(256)]) + raw[at + 1 :]
    if way == 2:
        return b"[" * dice.randrange(1, 5000) + raw
    if way == 3:
        return bytes(dice.randrange(256) for _ in range(dice.randrange(1, 80)))
    name = dice.choice([*body, "stop", "n", "seed", "logprobs", "stream", "top_k", "stop_token_ids", "sampling_params"])
    return json.dumps({**body, name: dice.choice(strange)}).encode()


def test_malformed_bodies_hurt_nobody(server: Serving) -> None:
    """Whatever is sent, the server answers it, never with a fault of its own, and goes on as before."""
    short = {"max_tokens": 2, "stop_token_ids": list(range(64))}  # whatever becomes of one of them
    usual = {
        "/v1/completions": {"prompt": "1+1=", "temperature": 0.5, **short},
        "/v1/chat/completions": {"messages": [{"role": "1", "content": "2"}], "tools": [], **short},
        "/inference/v1/generate": {"token_ids": [5, 6], "sampling_params": short},
        "/tokenize": {"prompt": "1"},
        "/detokenize": {"tokens": [5]},
    }
    call = {"prompt": PROMPTS[0], "seed": 1, "max_tokens": 20, "return_token_ids": True}
    before = server.post("/v1/completions", **call)["choices"][0]["token_ids"]
    dice, refused = random.Random(0), 0
    for number in range(350):
        path = dice.choice(list(usual))
        response = server.http.post(path, content=mutated(dice, usual[path]))
        assert response.status_code in (200, 400, 404, 413, 429), (number, path, response.text)
        if response.status_code != 200:
            refused += 1
            assert response.json()["error"]["message"]
    assert refused >= 200
    assert server.post("/v1/completions", **call)["choices"][0]["token_ids"] == before
    assert not server.died


def test_keys_sizes_and_queues_have_limits(chatty: Path) -> None:
    with serving(config_of(chatty), api_key="secret", queue=3, body_mib=1) as found:
        assert httpx.get(found.url + "/health").status_code == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer s\u00e9cret".encode()}):
            assert httpx.post(found.url + "/v1/completions", json={"prompt": "1"}, headers=headers).status_code == 401
        assert found.refused("/v1/completions", prompt="1" * 2**20)[0] == 413
        assert found.refused("/v1/completions", prompt=["1"] * 4)[0] == 400
        found.post("/pause", mode="keep")
        with found.http.stream("POST", "/v1/completions", json={"prompt": ["1"] * 3, "stream": True}) as response:
            assert response.status_code == 200
            status, error = found.refused("/v1/completions", prompt="1")
            assert (status, error["code"]) == (429, "queue_full")
        found.wait_until("vllm:num_requests_waiting", 0)
        found.post("/resume")
        assert found.post("/v1/completions", prompt="1")


# ---- clients that leave


def test_a_client_that_leaves_frees_its_pages(server: Serving) -> None:
    server.post("/pause", mode="keep")  # nobody is done before the clients have left
    call = {"prompt": PROMPTS, "n": 3, "max_tokens": 1000, "ignore_eos": True}
    with server.http.stream("POST", "/v1/completions", json={**call, "stream": True}):
        assert server.metric("vllm:num_requests_waiting") + server.metric("vllm:num_requests_running") == 9
    with pytest.raises(httpx.ReadTimeout):
        server.http.post("/v1/completions", json=call, timeout=0.3)
    server.wait_until("vllm:num_requests_waiting", 0)
    server.post("/resume")
    server.wait_until("vllm:kv_cache_usage_perc", 0)
    server.wait_until("vllm:num_requests_running", 0)


# ---- weights


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory, chatty: Path) -> Path:
    """The policy after a step."""
    from tlt.model.weights import load_policy

    path = tmp_path_factory.mktemp("policy") / "other"
    model = load_policy(chatty)
    with torch.no_grad():
        for index, weight in enumerate(model.parameters()):
            weight += 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(index))
    save_policy(model, path, tokenizer_from=chatty)
    return path


CALL = {"prompt": PROMPTS[0], "seed": 6, "max_tokens": 60, "ignore_eos": True, "return_token_ids": True}


def tokens_of(found: dict[str, Any]) -> list[int]:
    tokens: list[int] = found["choices"][0]["token_ids"]
    return tokens


def test_an_update_waits_for_the_requests_under_way(own: Serving, other: Path) -> None:
    """Under load, with updates all the while: no completion has two versions, and each is its version's own."""
    with tlt.Engine.open(other) as engine:
        changed = list(engine.generate(PROMPTS[0], max_tokens=60, ignore_eos=True, seed=6)[0].tokens)
    plain = tokens_of(own.post("/v1/completions", **CALL))
    assert plain != changed
    by_version = {0: plain, **dict.fromkeys(range(1, 5), changed)}
    found: list[dict[str, Any]] = []

    def ask() -> None:
        found.extend(own.post("/v1/completions", **CALL)["choices"][0] for _ in range(4))

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for number in range(1, 5):
        assert own.post("/update_weights", weight_dir=str(other))["version"] == number
    for thread in threads:
        thread.join()
    assert len(found) == 24
    for choice in found:
        assert len(choice["weight_versions"]) == 1
        assert choice["token_ids"] == by_version[choice["weight_version"]]
    assert own.metric("tlt:policy_version") == 4


def test_paused_requests_go_on_with_other_weights_and_say_from_where(own: Serving, other: Path) -> None:
    answers: list[dict[str, Any]] = []
    plain = tokens_of(own.post("/v1/completions", **CALL))
    with own.http.stream("POST", "/v1/completions", json={**CALL, "stream": True}) as response:
        lines = response.iter_lines()
        for _ in range(5):
            next(lines)
        own.post("/pause", mode="keep")
        assert own.http.get("/is_paused").json() == {"is_paused": True}
        own.post("/update_weights", weight_dir=str(other), version=7)
        own.post("/resume")
        answers = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    last = answers[-1]["choices"][0]
    assert last["weight_version"] in (0, 7)  # 0: it was done before the pause
    spans = last["weight_versions"]
    if last["weight_version"] == 7:
        assert [span["version"] for span in spans] in ([0, 7], [7])
        assert 0 <= spans[-1]["start"] < 60
    assert tokens_of(own.post("/v1/completions", **CALL)) != plain


def test_weights_come_as_a_body_some_or_all_or_not_at_all(own: Serving, other: Path) -> None:
    from tlt.model.weights import load_policy

    plain = tokens_of(own.post("/v1/completions", **CALL))
    tensors = {name: tensor.contiguous() for name, tensor in hf_tensors(load_policy(other)).items()}
    headers = {"Content-Type": "application/octet-stream"}
    name = next(name for name in tensors if name.endswith("o_proj.weight"))
    for wrong in (
        {name: tensors[name][1:].contiguous()},
        {"nothing": tensors[name].clone()},
        {name: tensors[name].int()},
    ):
        response = own.http.post("/update_weights", content=save({**tensors, **wrong}), headers=headers)
        assert response.status_code == 400, response.text
    assert own.http.post("/update_weights", content=b"junk", headers=headers).status_code == 400
    assert tokens_of(own.post("/v1/completions", **CALL)) == plain
    names = list(tensors)
    for version, part in ((1, names[: len(names) // 2]), (9, names[len(names) // 2 :])):
        body = save({name: tensors[name] for name in part})
        path = "/update_weights" + ("?version=9" if version == 9 else "")
        assert own.http.post(path, content=body, headers=headers).json()["version"] == version
    with tlt.Engine.open(other) as engine:
        changed = list(engine.generate(PROMPTS[0], max_tokens=60, ignore_eos=True, seed=6)[0].tokens)
    assert tokens_of(own.post("/v1/completions", **CALL)) == changed


def write_adapter(path: Path, served: Serving, scale: float) -> dict[str, torch.Tensor]:
    """PEFT's files; and what the adapter adds to each matrix."""
    path.mkdir()
    (path / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": "tiny"})
    )
    generator, tensors, changes = torch.Generator().manual_seed(0), dict[str, torch.Tensor](), {}
    for name, weight in hf_tensors(served.served.model).items():
        if name.endswith(("q_proj.weight", "down_proj.weight")):
            a = torch.randn((2, weight.shape[1]), generator=generator)
            b = scale * torch.randn((len(weight), 2), generator=generator)
            stem = "base_model.model." + name.removesuffix(".weight")
            tensors |= {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}
            changes[name] = 2.0 * b @ a
    (path / "adapter_model.safetensors").write_bytes(save(tensors))
    return changes


def test_adapters_replace_each_other_and_leave_without_a_trace(own: Serving, tmp_path: Path) -> None:
    plain = tokens_of(own.post("/v1/completions", **CALL))
    before = {name: tensor.clone() for name, tensor in hf_tensors(own.served.model).items()}
    write_adapter(tmp_path / "first", own, 0.3)
    changes = write_adapter(tmp_path / "second", own, 0.1)
    for name in ("first", "second"):
        own.post("/v1/load_lora_adapter", lora_name=name, lora_path=str(tmp_path / name))
    for name, tensor in hf_tensors(own.served.model).items():
        torch.testing.assert_close(tensor, before[name] + changes.get(name, 0.0), atol=1e-6, rtol=1e-5)
    assert own.post("/v1/completions", **CALL, model="second")["model"] == "second"
    assert own.refused("/v1/completions", **CALL, model="tiny")[0] == 404
    assert own.refused("/unload_lora_adapter", lora_name="first")[0] == 404
    own.post("/unload_lora_adapter", lora_name="second")
    assert tokens_of(own.post("/v1/completions", **CALL, model="tiny")) == plain
    (tmp_path / "second" / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": "tiny", "use_dora": true}'
    )
    _, error = own.refused("/load_lora_adapter", lora_name="x", lora_path=str(tmp_path / "second"))
    assert "use_dora" in error["message"]


# ---- the server's life


def test_asleep_it_answers_nobody_and_awake_as_before(own: Serving) -> None:
    plain = tokens_of(own.post("/v1/completions", **CALL))
    own.post("/sleep")
    assert own.http.get("/is_sleeping").json() == {"is_sleeping": True}
    assert own.refused("/v1/completions", **CALL)[0] == 503
    assert "vllm:num_requests_running" in own.http.get("/metrics").text
    own.post("/wake_up")
    assert tokens_of(own.post("/v1/completions", **CALL)) == plain
    own.post("/reset_prefix_cache")
    assert tokens_of(own.post("/v1/completions", **CALL)) == plain


def test_pausing_ends_keeps_or_awaits_what_is_under_way(own: Serving) -> None:
    found: list[dict[str, Any]] = []

    def ask() -> None:
        found.append(own.post("/v1/completions", **{**CALL, "max_tokens": 100})["choices"][0])

    for mode, expected in (("abort", "abort"), ("wait", "length"), ("keep", "length")):
        own.post("/pause", mode="keep")
        thread = threading.Thread(target=ask)
        thread.start()
        own.wait_until("vllm:num_requests_waiting", 1)
        if mode != "abort":
            own.post("/resume")
        own.post("/pause", mode=mode)
        own.post("/resume")
        thread.join()
        assert found[-1]["finish_reason"] == expected


def test_an_aborted_completion_is_scored_as_far_as_it_came(own: Serving) -> None:
    found: list[dict[str, Any]] = []
    call = {**CALL, "max_tokens": 400, "echo": True, "logprobs": 2}
    own.post("/pause", mode="keep")
    thread = threading.Thread(target=lambda: found.append(own.post("/v1/completions", **call)["choices"][0]))
    thread.start()
    own.wait_until("vllm:num_requests_waiting", 1)
    own.post("/pause", mode="abort")
    thread.join()
    assert found[0]["finish_reason"] == "abort"
    assert len(found[0]["logprobs"]["tokens"]) == len(found[0]["prompt_token_ids"]) + len(found[0]["token_ids"])
    own.post("/resume")


def test_a_prompt_is_scored_with_the_weights_that_its_version_names(own: Serving, other: Path) -> None:
    """One that came while the server was paused is scored after an update."""
    found: list[dict[str, Any]] = []
    call = {"prompt": PROMPTS[0], "max_tokens": 0, "echo": True, "logprobs": 0}
    before = own.post("/v1/completions", **call)["choices"][0]
    own.post("/pause", mode="keep")
    thread = threading.Thread(target=lambda: found.append(own.post("/v1/completions", **call)["choices"][0]))
    thread.start()
    while not own.http.get("/load").json()["server_load"]:
        pass
    own.post("/update_weights", weight_dir=str(other), version=3)
    own.post("/resume")
    thread.join()
    after = own.post("/v1/completions", **call)["choices"][0]
    assert (before["weight_version"], found[0]["weight_version"], after["weight_version"]) == (0, 3, 3)
    assert found[0]["logprobs"] == after["logprobs"] != before["logprobs"]


def test_a_large_body_is_tokenized_while_others_are_served(own: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    from tlt.text import Tokenizer

    begun, go_on, encode = threading.Event(), threading.Event(), Tokenizer.encode_text
    answers: list[tuple[int, dict[str, Any]]] = []

    def slow(tokenizer: Tokenizer, text: str, *, special: bool = False) -> list[int]:
        if len(text) > 1000:
            begun.set()
            go_on.wait(60)
        return encode(tokenizer, text, special=special)

    monkeypatch.setattr(Tokenizer, "encode_text", slow)
    thread = threading.Thread(target=lambda: answers.append(own.refused("/v1/completions", prompt="1" * 100_000)))
    thread.start()
    assert begun.wait(60)
    try:
        assert own.http.get("/health").status_code == 200
        assert tokens_of(own.post("/v1/completions", **CALL))
        assert not answers
    finally:
        go_on.set()
        thread.join()
    assert answers[0][0] == 400


def test_a_drafter_learns_while_serving(chatty: Path) -> None:
    """Tokens stay, and more drafts are accepted."""
    knobs = {"spec.drafter": "eagle", "spec.path": "new", "drafting.held_out": 64, "drafting.check": 4}
    shape = {"spec.shape_policy": "fixed", "spec.depths": (3,), "spec.widths": (2,), "spec.verifies": (6,)}
    prompts = [f"{a}+{b}*{c}=" for a in range(1, 5) for b in (2, 5, 7) for c in (3, 4)]
    with serving(config_of(chatty, **knobs, **shape, **{"draft.unroll": 2, "draft.single_steps": 0})) as found:

        def accept_length() -> float:
            before = [found.metric(f"vllm:spec_decode_num_{name}_total") for name in ("drafts", "accepted_tokens")]
            choices.append(found.post("/v1/completions", prompt=prompts, seed=1, n=2, max_tokens=40)["choices"])
            after = [found.metric(f"vllm:spec_decode_num_{name}_total") for name in ("drafts", "accepted_tokens")]
            return 1 + (after[1] - before[1]) / (after[0] - before[0])

        choices: list[list[dict[str, Any]]] = []
        young, ends = accept_length(), threading.Event()
        for _ in range(400):
            if found.metric("tlt:drafter_version") > 1 or ends.wait(0.05):
                break
        assert found.metric("tlt:drafter_version") > 1
        assert accept_length() > young + 0.2
        assert [choice["text"] for choice in choices[0]] == [choice["text"] for choice in choices[1]]


def test_a_dead_engine_ends_the_server_and_its_calls(chatty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(config_of(chatty)) as found:

        def broken() -> None:
            raise MemoryError("no more")

        monkeypatch.setattr(found.served, "tick", broken)
        monkeypatch.setattr(threading, "excepthook", lambda _: None)
        status, error = found.refused("/v1/completions", **CALL)
        assert status in (500, 503)
        assert "no more" in error["message"]
        assert found.http.get("/health").status_code == 503
        assert found.died
        assert found.refused("/v1/completions", **CALL)[0] == 503


def test_settings_that_open_the_server_to_others_need_a_key() -> None:
    from tlt.errors import ConfigError
    from tlt.serve.options import ServeOptions
    from tlt.serve.server import serve

    with pytest.raises(ConfigError, match="api-key"):
        serve(config_of(), replace(ServeOptions(), host="0.0.0.0"))
