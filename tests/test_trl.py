"""GRPO by the real TRL with completions written by the engine. Left out where trl is not installed."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

trl = pytest.importorskip("trl")
pytest.importorskip("datasets")

from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

import tlt  # noqa: E402
from examples import trl_grpo  # noqa: E402
from tlt.engine.request import Request  # noqa: E402
from tlt.errors import ConfigError  # noqa: E402
from tlt.integrations.trl import TrlRollouts, merged_tensors, rollout_func  # noqa: E402
from tlt.model.weights import load_policy  # noqa: E402
from tlt.policy import TINY_POLICY  # noqa: E402
from tlt.types import Key, SamplingParams  # noqa: E402

PLAIN_ROWS = [{"prompt": f"{a}+{b}="} for a in range(1, 5) for b in range(1, 5)]
_COLUMNS = ("prompt_ids", "completion_ids", "logprobs")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


class Checked:
    """The rollouts, and whether the trainer's model agrees with their log-probabilities at that very step."""

    def __init__(self, rollouts: TrlRollouts) -> None:
        self.rollouts = rollouts
        self.found: list[dict[str, list[Any]]] = []
        self.worst = 0.0
        self.said: list[int] = []  # by a tool, to every completion
        self.turns: list[list[int]] = []  # what came behind it

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        found = self.rollouts(prompts, trainer)
        self.found.append(found)
        if self.said:
            texts = zip(found["prompt_ids"], found["completion_ids"], strict=True)
            self.turns += self.rollouts.turn(trainer, [[*a, *b, *self.said] for a, b in texts])[0]
        masks = found.get("env_mask") or [[1] * len(tokens) for tokens in found["completion_ids"]]
        for prompt, tokens, logprobs, mask in zip(*(found[name] for name in _COLUMNS), masks, strict=True):
            with torch.no_grad():
                logits = trainer.model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
            expected = logits.float().log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
            apart = (expected - torch.tensor(logprobs)) * torch.tensor(mask)
            self.worst = max(self.worst, float(apart.abs().max()))
        return found


def train(out: Path, rollouts: TrlRollouts, steps: int = 3, said: Sequence[int] = (), **settings: Any) -> Checked:
    checked = Checked(rollouts)
    checked.said = list(said)
    args = trl.GRPOConfig(
        output_dir=str(out),
        max_steps=steps,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=24,
        learning_rate=1e-3,
        report_to=[],
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        gradient_checkpointing=False,
        disable_tqdm=True,
        logging_strategy="no",
        **settings.pop("args", {}),
    )
    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(TINY_POLICY, dtype=torch.float32),
        processing_class=settings.pop("tokenizer", None) or AutoTokenizer.from_pretrained(TINY_POLICY),
        reward_funcs=lambda completions, **_: [float(len(text) % 3) for text in completions],
        args=args,
        train_dataset=Dataset.from_list(settings.pop("rows", PLAIN_ROWS)),
        rollout_func=checked,
        **settings,
    )
    trainer.train()
    return checked


def completions(checked: Checked) -> list[list[int]]:
    return [tokens for found in checked.found for tokens in found["completion_ids"]]


def test_the_trainers_own_tensors_write_the_rollouts(tmp_path: Path) -> None:
    """Log-probabilities agree at every step, so that the weights are the step's; drafts change no token."""
    checked = train(tmp_path, rollout_func(kv_gib=0.05))
    assert checked.rollouts._shares
    assert len(checked.found) == 3
    assert checked.worst < 1e-4
    plain = train(tmp_path, rollout_func(kv_gib=0.05, spec={"drafter": "none"}))
    assert completions(plain) == completions(checked)
    learned = rollout_func(kv_gib=0.05, spec={"drafter": "both", "path": "new"}, draft_share=1.0)
    assert completions(train(tmp_path, learned)) == completions(checked)


def test_adapters_are_merged_into_copies(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    checked = train(tmp_path, rollout_func(kv_gib=0.05), peft_config=lora)
    assert not checked.rollouts._shares
    assert checked.worst < 1e-4


def test_names_and_values_are_those_of_the_files() -> None:
    model = AutoModelForCausalLM.from_pretrained(TINY_POLICY, dtype=torch.float32)
    from tlt.model.weights import hf_tensors

    ours, theirs = hf_tensors(load_policy(TINY_POLICY)), dict(merged_tensors(model))
    assert all(torch.equal(theirs[name], tensor) for name, tensor in ours.items())


def test_replies_are_read_masked_and_gone_on_from(tmp_path: Path) -> None:
    """The first of two turns is that of a rollout without replies; the trainer masks the reply."""
    said, asked, hot = [20, 7, 6], Counter[str](), {"temperature": 2.0}
    single = train(tmp_path, rollout_func(kv_gib=0.05), steps=1, said=said, args=hot)
    tokenizer = AutoTokenizer.from_pretrained(TINY_POLICY)
    alone = [tokenizer.decode(ids, skip_special_tokens=True) for ids in single.found[0]["completion_ids"]]
    replied = {max(alone, key=len)}

    def reply(prompt: str, text: str) -> list[int] | None:
        asked[text] += 1
        return said if text in replied else None

    double = train(tmp_path, rollout_func(kv_gib=0.05, reply=reply), steps=1, args=hot)
    first, second = single.found[0], double.found[0]
    columns = alone, first["completion_ids"], second["completion_ids"], second["env_mask"], single.turns
    for text, ids, tokens, mask, turn in zip(*columns, strict=True):
        assert asked[text]
        assert tokens[: len(ids)] == ids
        assert len(mask) == len(tokens)
        assert (0 in mask) == (text in replied)
        if 0 in mask:
            start = mask.index(0)
            assert start == len(ids)
            assert tokens[start : start + 3] == said
            assert mask[start : start + 3] == [0, 0, 0]
            end = mask.index(0, start + 3) if 0 in mask[start + 3 :] else len(mask)
            assert tokens[start + 3 : end] == turn[: end - start - 3]  # as in TRL's own loop
    assert 0 < sum(text in replied for text in alone) < 8


TOOL_TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}"
    "{{ call.function.name }}{{ call.function.arguments }}{% endfor %}{% endfor %}"
)


class OncePerAnswer:
    """An environment whose one tool adds to what was written."""

    def reset(self, **row: Any) -> None:
        self.calls = 0

    def more(self) -> str:
        """Asks for more.

        Returns:
            A term and an equals sign.
        """
        self.calls += 1
        return "+1="

    def get_reward(self) -> float:
        return float(self.calls)


def test_an_environment_calls_the_engine_for_every_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's own tool loop. The tiny policy writes no JSON: its even first turns are read as a call of the tool."""
    tool, seen = "+1=", list[tuple[list[int], list[int]]]()

    def read(tokenizer: Any, ids: list[int], prefix: list[int], tools: Any = None) -> dict[str, Any]:
        seen.append((list(prefix), list(ids)))
        message: dict[str, Any] = {"role": "assistant", "content": tokenizer.decode(ids)}
        call = {"type": "function", "function": {"name": "more", "arguments": {}}}
        first = not tokenizer.decode(prefix).endswith(tool)
        return {**message, "tool_calls": [call]} if first and len(ids) % 2 == 0 else message

    monkeypatch.setattr("trl.trainer.grpo_trainer.parse_response", read)
    tokenizer = AutoTokenizer.from_pretrained(TINY_POLICY)
    tokenizer.chat_template, tokenizer.response_schema = TOOL_TEMPLATE, {}
    prompts = [{"prompt": [{"role": "user", "content": f"{a}+{b}="}]} for a in range(1, 5) for b in range(1, 5)]
    settings = {"environment_factory": OncePerAnswer, "rows": prompts, "tokenizer": tokenizer}
    train(tmp_path, rollout_func(kv_gib=0.05), steps=1, args={"temperature": 2.0}, **settings)
    said = tuple(tokenizer.encode(tool, add_special_tokens=False))
    called = [(place, prefix, ids) for place, (prefix, ids) in enumerate(seen[:8]) if len(ids) % 2 == 0]
    called = [(place, prefix, ids) for place, prefix, ids in called if len(ids) + len(said) <= 24]
    assert 0 < len(called) == len(seen) - 8 < 8
    params = SamplingParams(temperature=2.0, max_tokens=24)
    with tlt.Engine.open(str(TINY_POLICY), device="cpu") as engine:
        for (place, prefix, ids), (text, turn) in zip(called, seen[8:], strict=True):
            whole = (*prefix, *ids, *said)  # computed from its first token, with the key of the first turn
            assert tuple(text) == whole
            engine._core.submit([Request(Key(42, place), whole, params)])
            (again,) = engine._core.drain()
            assert turn == list(again.tokens)[: 24 - len(ids) - len(said)]


def test_settings_that_the_engine_does_not_know_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="repetition_penalty"):
        train(tmp_path, rollout_func(kv_gib=0.05), args={"repetition_penalty": 1.1})


def test_the_example_learns_what_it_is_asked(tmp_path: Path) -> None:
    trainer = trl_grpo.main(steps=2, out=str(tmp_path))
    rewards = [line["reward"] for line in trainer.state.log_history if "reward" in line]
    assert len(rewards) == 2
    assert max(rewards) > 0
