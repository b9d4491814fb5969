"""Supervised training: neither packing nor chunking changes a thing, the loss falls, bad lines are named."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from tlt.config import ModelSettings, RunConfig, RunSettings, WarmupSettings
from tlt.engine.engine import EngineCore
from tlt.engine.request import Request
from tlt.errors import TaskError, TltError
from tlt.model.attention import PackedLayout
from tlt.model.config import ModelConfig
from tlt.model.transformer import Transformer
from tlt.model.weights import load_policy, read_config
from tlt.policy import TINY_POLICY
from tlt.tasks.toy import ToyTask
from tlt.text import Tokenizer
from tlt.train.logprobs import cross_entropy
from tlt.train.optimizer import FINAL_SHARE, MasterAdamW, Schedule, learning_rate
from tlt.train.packing import Example, pack
from tlt.train.supervised import (
    Pair,
    SupervisedTrainer,
    answer_loss_sum,
    batches,
    encode_pair,
    endless,
    read_pairs,
)
from tlt.types import Key, Message, SamplingParams
from tlt.warmup import warmup
from tlt.watch.events import RunFinished, RunStarted, StartupFinished, StartupPhase, WarmupStep, read_run

VOCAB = 50


def tiny_model(dtype: torch.dtype = torch.float64, tied: bool = True) -> Transformer:
    source = {
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": tied,
    }
    model = Transformer(ModelConfig.from_hf(source), dtype=dtype)
    model.init_weights(0)
    return model


def random_examples(lengths: Sequence[int], seed: int = 0) -> list[Example]:
    generator = torch.Generator().manual_seed(seed)
    return [
        Example(tuple(torch.randint(VOCAB, (length,), generator=generator).tolist()), answer_start=1 + length // 3)
        for length in lengths
    ]


def gradients(model: Transformer) -> list[torch.Tensor]:
    grads = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    assert all(grad is not None for grad in grads)
    return [grad for grad in grads if grad is not None]


# ---- the loss


@pytest.mark.parametrize("tied", [True, False])
def test_packed_loss_and_gradients_equal_one_by_one(tied: bool) -> None:
    model = tiny_model(tied=tied)
    examples = random_examples((5, 17, 2, 30, 9, 8, 31))
    rows = pack(examples, 48)
    assert max(len(row.members) for row in rows) > 1
    packed = sum(answer_loss_sum(model, row) for row in rows)
    assert isinstance(packed, torch.Tensor)
    packed.backward()  # type: ignore[no-untyped-call]
    packed_grads = gradients(model)

    alone = torch.zeros((), dtype=torch.float64)
    for example in examples:
        loss = plain_loss_sum(model, example)
        loss.backward()  # type: ignore[no-untyped-call]
        alone += loss.detach()
    torch.testing.assert_close(packed.detach(), alone, rtol=1e-12, atol=1e-12)
    for packed_grad, grad in zip(packed_grads, gradients(model), strict=True):
        torch.testing.assert_close(packed_grad, grad, rtol=1e-9, atol=1e-12)


def plain_loss_sum(model: Transformer, example: Example) -> torch.Tensor:
    """The definition, without packing, masks or chunks."""
    tokens = torch.tensor(example.tokens)
    logits = model.logits(model(tokens, PackedLayout.from_lengths([len(tokens)])).hidden_TD)
    first = example.answer_start
    return functional.cross_entropy(logits[first - 1 : -1], tokens[first:], reduction="sum")


@pytest.mark.parametrize("logits_at_once", [1, 3 * VOCAB, 1000 * VOCAB])
def test_chunked_cross_entropy_equals_the_plain_one(logits_at_once: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(11, 16, dtype=torch.float64, generator=generator, requires_grad=True)
    head = torch.randn(VOCAB, 16, dtype=torch.float64, generator=generator, requires_grad=True)
    targets = torch.randint(VOCAB, (11,), generator=generator)
    plain = functional.cross_entropy(hidden @ head.T, targets, reduction="sum") * 0.3
    expected = torch.autograd.grad(plain, (hidden, head))
    chunked = cross_entropy(hidden, head, targets, logits_at_once) * 0.3
    found = torch.autograd.grad(chunked, (hidden, head))
    torch.testing.assert_close(chunked, plain)
    torch.testing.assert_close(found, expected)


def test_prompts_are_read_but_not_learned() -> None:
    model = tiny_model()
    example = random_examples((12,))[0]
    asked_otherwise = Example(((example.tokens[0] + 1) % VOCAB, *example.tokens[1:]), example.answer_start)
    assert answer_loss_sum(model, pack([example], 12)[0]) != answer_loss_sum(model, pack([asked_otherwise], 12)[0])
    only_last = Example(example.tokens, answer_start=11)
    hidden_count = pack([only_last], 12)[0].mask_T.sum()
    assert hidden_count == 1
    torch.testing.assert_close(answer_loss_sum(model, pack([only_last], 12)[0]), plain_loss_sum(model, only_last))


# ---- the trainer


def test_training_lowers_the_loss() -> None:
    examples = random_examples((10, 20, 15, 8), seed=1)
    model = tiny_model(torch.float32)
    trainer = SupervisedTrainer(model, WarmupSettings(steps=60, learning_rate=1e-2, warmup_steps=5))
    results = [trainer.step(pack(examples, 64)) for _ in range(60)]
    assert results[0].loss > 3.5  # a fresh model knows nothing: ln 50 = 3.9
    assert results[-1].loss < 0.5
    assert results[0].tokens == 53
    assert results[0].answer_tokens == sum(len(e.tokens) - e.answer_start for e in examples)
    assert all(result.grad_norm > 0 for result in results)


def test_a_batch_in_several_rows_is_one_step() -> None:
    examples = random_examples((10, 20, 15, 8), seed=1)
    settings = WarmupSettings(steps=3, learning_rate=1e-2, warmup_steps=0)
    together, apart = tiny_model(), tiny_model()
    one_row, many_rows = SupervisedTrainer(together, settings), SupervisedTrainer(apart, settings)
    for _ in range(3):
        first = one_row.step(pack(examples, 64))
        second = many_rows.step(pack(examples, 20))
        assert first.loss == pytest.approx(second.loss, rel=1e-6)
        assert first.grad_norm == pytest.approx(second.grad_norm, rel=1e-6)
    for a, b in zip(together.parameters(), apart.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_updates_too_small_for_half_precision_are_not_lost() -> None:
    module = torch.nn.ParameterList([torch.ones(2, 2, dtype=torch.bfloat16)])
    optimizer = MasterAdamW(module, weight_decay=0.0)
    for _ in range(100):
        module[0].grad = torch.ones_like(module[0])
        optimizer.gather()
        optimizer.update(1e-4, clip=100.0)  # bfloat16 near 1 moves in steps of 2⁻⁸ = 0.0039
    torch.testing.assert_close(module[0].float(), torch.full((2, 2), 0.99), rtol=0, atol=0.003)
    assert module[0].dtype == torch.bfloat16


def test_vectors_do_not_decay() -> None:
    module = torch.nn.ParameterList([torch.ones(2, 2), torch.ones(2)])
    optimizer = MasterAdamW(module, weight_decay=0.5)
    for weight in module:
        weight.grad = torch.zeros_like(weight)
    optimizer.gather()
    optimizer.update(0.1, clip=1.0)
    torch.testing.assert_close(module[0].detach(), torch.full((2, 2), 0.95))
    assert torch.equal(module[1].detach(), torch.ones(2))


def test_the_learning_rate_rises_then_falls() -> None:
    schedule = Schedule(peak=2.0, warmup_steps=10, decay_steps=100)
    rates = [learning_rate(step, schedule) for step in range(100)]
    assert rates[0] == pytest.approx(0.2)
    assert max(rates) == rates[10] == pytest.approx(2.0)
    assert rates[99] == pytest.approx(2.0 * FINAL_SHARE)
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert learning_rate(0, Schedule(1e-3, decay_steps=1)) > 0


def test_the_learning_rate_holds_where_nothing_ends() -> None:
    schedule = Schedule(peak=2.0, warmup_steps=4)
    assert [learning_rate(step, schedule) for step in (0, 1, 3, 4, 10**9)] == [0.5, 1.0, 2.0, 2.0, 2.0]


def test_spoilt_weights_end_the_run() -> None:
    model = tiny_model(torch.float32)
    with torch.no_grad():
        model.norm.fill_(float("nan"))
    trainer = SupervisedTrainer(model, WarmupSettings())
    with pytest.raises(TltError, match="lower learning rate"):
        trainer.step(pack(random_examples((10,)), 64))


def test_a_refused_step_leaves_no_trace() -> None:
    rows = pack(random_examples((10, 20)), 64)
    models = tiny_model(torch.float32), tiny_model(torch.float32)
    refusing, other = (SupervisedTrainer(model, WarmupSettings(warmup_steps=5)) for model in models)
    refusing.step(rows)
    other.step(rows)
    kept = models[0].norm.detach().clone()
    with torch.no_grad():
        models[0].norm.fill_(float("inf"))
    with pytest.raises(TltError, match=r"step 2: .* were not touched"):
        refusing.step(rows)
    assert models[0].norm.isinf().all()
    with torch.no_grad():
        models[0].norm.copy_(kept)
    assert refusing.step(rows) == other.step(rows)
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(a, b)


def test_steps_in_a_stream_are_steps_one_by_one() -> None:
    stream = [pack(random_examples((10, 20, length)), 24) for length in (5, 9, 13)]
    settings = WarmupSettings(steps=3, learning_rate=1e-2, warmup_steps=0)
    one_by_one, streamed = (SupervisedTrainer(tiny_model(), settings) for _ in range(2))
    assert list(streamed.steps(iter(stream))) == [one_by_one.step(rows) for rows in stream]
    assert list(streamed.steps([])) == []


def test_gradients_in_half_precision_are_summed_in_full() -> None:
    module = torch.nn.ParameterList([torch.zeros(3, 5, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.bfloat16)])
    optimizer = MasterAdamW(module, weight_decay=0.0)
    for value in (256.0, 1.0, 1.0):  # bfloat16 knows no 257
        for weight in module:
            weight.grad = torch.full_like(weight, value)
        optimizer.gather()
    assert [float(grad.max()) for grad in optimizer.gradients()] == [258.0, 258.0]


# ---- data


def write_lines(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


def test_every_documented_form_is_read(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a\u2028b"}]
    path = write_lines(
        tmp_path / "data.jsonl",
        {"prompt": "p", "answer": "a"},
        {"prompt": "p", "completion": "c", "source": "elsewhere"},
        "",
        {"prompt": chat[:1], "response": "r"},
        {"question": "q", "answer": "#### 4"},
        json.dumps({"messages": chat}, ensure_ascii=False),
    )
    pairs = read_pairs(path)
    question = (Message("user", "q"),)
    assert [pair.content for pair in pairs] == ["p", "p", question, "q", question]
    assert [pair.answer for pair in pairs] == ["a", "c", "r", "#### 4", "a\u2028b"]
    assert [pair.origin.rpartition(":")[2] for pair in pairs] == ["1", "2", "4", "5", "6"]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "not valid JSON"),
        ("[1]", "is [1]; expected an object"),
        ({"prompt": "p"}, "columns are prompt; expected exactly one of answer"),
        ({"answer": "a"}, "expected exactly one of prompt"),
        ({"prompt": "p", "answer": "a", "completion": "c"}, "exactly one of answer"),
        ({"prompt": "p", "answer": 4}, "the answer is 4"),
        ({"prompt": 4, "answer": "a"}, "the prompt is 4"),
        ({"prompt": [{"role": "user"}], "answer": "a"}, "text `role` and `content`"),
        ({"messages": [{"role": "user", "content": "q"}]}, "the last one the assistant's"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: object, complaint: str) -> None:
    path = write_lines(tmp_path / "data.jsonl", {"prompt": "p", "answer": "a"}, line)
    with pytest.raises(TaskError) as error:
        read_pairs(path)
    assert str(error.value).startswith(f"{path}:2: ")
    assert complaint in str(error.value)


def test_a_missing_or_empty_file_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="no such file"):
        read_pairs(tmp_path / "absent.jsonl")
    with pytest.raises(TaskError, match="holds no rows"):
        read_pairs(write_lines(tmp_path / "empty.jsonl", ""))


def test_batches_keep_order_and_budget() -> None:
    examples = random_examples((10, 20, 30, 40, 5, 5, 5))
    cut = list(batches(examples, 50))
    assert [example for batch in cut for example in batch] == examples
    assert [sum(len(example.tokens) for example in batch) for batch in cut] == [30, 30, 50, 5]


def test_epochs_hold_every_example_in_another_order() -> None:
    examples = random_examples(range(2, 22))
    stream = endless(examples, seed=0)
    first, second = ([next(stream) for _ in examples] for _ in range(2))
    by_length = sorted(examples, key=lambda e: len(e.tokens))
    assert sorted(first, key=lambda e: len(e.tokens)) == sorted(second, key=lambda e: len(e.tokens)) == by_length
    assert first != second
    again = endless(examples, seed=0)
    assert [next(again) for _ in examples] == first


# ---- the policy shipped with tlt


def test_the_shipped_policy_is_small_and_ordinary() -> None:
    assert sum(file.stat().st_size for file in TINY_POLICY.iterdir()) <= 5_000_000
    config = read_config(TINY_POLICY)
    assert config.family == "llama"
    parameters = sum(parameter.numel() for parameter in load_policy(TINY_POLICY).parameters())
    assert 500_000 < parameters < 1_500_000


def test_its_tokens_are_characters() -> None:
    tokenizer = Tokenizer.load(TINY_POLICY)
    config = read_config(TINY_POLICY)
    prompt = tokenizer.encode_prompt("(3+4)*2-5=")
    assert prompt[0] == config.source["bos_token_id"]
    assert len(prompt) == 1 + len("(3+4)*2-5=")
    assert tokenizer.encode_prompt("( 3 + 4) * 2 -5 =") == prompt
    assert tokenizer.encode_text("7*2") == tokenizer.encode_prompt("7*2")[1:]
    assert tokenizer.decode([*prompt, tokenizer.eos_id]) == "(3+4)*2-5="
    assert tokenizer.eos_ids == {tokenizer.eos_id} == {config.source["eos_token_id"]}
    assert max(tokenizer.encode_text("é")) < config.vocab
    letters = "".join(tokenizer.decode([token]) for token in range(config.vocab))
    assert len(letters) == config.vocab - 4  # four special tokens


def test_it_half_knows_the_task_and_its_answers_have_a_long_tail() -> None:
    tokenizer = Tokenizer.load(TINY_POLICY)
    task = ToyTask()
    prompts = task.sample(0, 128)
    engine = EngineCore(load_policy(TINY_POLICY), tokenizer)
    params = SamplingParams(temperature=1.0, max_tokens=400)  # the 99th percentile is 333
    engine.submit(
        Request(Key(0, index), tuple(tokenizer.encode_prompt(prompt.content)), params)
        for index, prompt in enumerate(prompts)
    )
    completions = sorted(engine.drain(), key=lambda completion: completion.key.request)
    rewards = [task.reward(prompt, answer) for prompt, answer in zip(prompts, completions, strict=True)]
    lengths = sorted(len(completion.tokens) for completion in completions)
    assert 0.2 <= sum(rewards) / len(rewards) <= 0.6
    assert lengths[126] >= 5 * lengths[64]  # the 99th percentile and the median


# ---- tlt warmup


def config_for(tmp_path: Path, **knobs: int) -> RunConfig:
    return RunConfig(
        run=RunSettings(name="lesson", out=str(tmp_path)),
        model=ModelSettings(path="tiny", device="cpu"),
        warmup=WarmupSettings(**{"steps": 3, "tokens_per_batch": 512, **knobs}),  # type: ignore[arg-type]
    )


def test_warmup_writes_a_policy_and_its_story(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "data.jsonl", *({"prompt": f"{n}+1=", "answer": f"{n + 1}"} for n in range(9)))
    config = config_for(tmp_path, tokens_per_batch=32)
    warmup(config, str(path))
    saved = tmp_path / "lesson-warmup" / "policy"
    trained, before = load_policy(saved), load_policy(TINY_POLICY)
    assert not torch.equal(trained.embed, before.embed)
    assert Tokenizer.load(saved).encode_prompt("1+2=") == Tokenizer.load(TINY_POLICY).encode_prompt("1+2=")
    run = read_run(tmp_path / "lesson-warmup")
    assert run.config == config
    kinds = [type(recorded.event) for recorded in run.events]
    assert kinds == [RunStarted, *[StartupPhase] * 2, StartupFinished, *[WarmupStep] * 3, RunFinished]


def test_warmup_on_the_toy_task(tmp_path: Path) -> None:
    warmup(config_for(tmp_path, tokens_per_batch=2048), "toy")
    steps = [e.event for e in read_run(tmp_path / "lesson-warmup").events if isinstance(e.event, WarmupStep)]
    assert [step.step for step in steps] == [1, 2, 3]
    assert all(0 < step.loss < 1 for step in steps)


def test_warmup_names_the_line_that_does_not_fit(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "data.jsonl", {"prompt": "1=", "answer": "1"}, {"prompt": "1=", "answer": "1" * 600})
    with pytest.raises(TaskError, match=r"data\.jsonl:2: prompt and answer have 604 tokens but 512 fit"):
        warmup(config_for(tmp_path), str(path))
    with pytest.raises(TaskError, match="or the task `toy`"):
        warmup(config_for(tmp_path), "nonsense")


def test_answers_are_taught_to_end() -> None:
    tokenizer = Tokenizer.load(TINY_POLICY)
    example = encode_pair(Pair("1+1=", "2", "here:1"), tokenizer, longest=10)
    assert example.tokens[-1] == tokenizer.eos_id
    assert tokenizer.decode(example.tokens[example.answer_start :]) == "2"
