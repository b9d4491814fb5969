"""GRPO in one file: the rollout by TLT's engine, everything else in plain torch.

    python examples/grpo_in_one_file.py            # a minute on a CPU, with the tiny policy shipped with tlt

The engine reads the very tensors that the optimizer updates, so handing it a new policy costs nothing. Drafts come from
earlier completions of the same prompt (the suffix drafter); they change the time of a rollout, never its tokens.
For real runs use `tlt train`, which adds packing, checkpoints, a learned drafter, many workers and much else.
"""

import argparse
import time
from collections.abc import Sequence

import torch
from torch import Tensor

import tlt
from tlt.config import ToySettings
from tlt.model.attention import PackedLayout
from tlt.model.transformer import Transformer
from tlt.tasks.toy import ToyTask
from tlt.types import Completion

PROMPTS, GROUP = 16, 8  # prompts a step, completions of each
CLIP_LOW, CLIP_HIGH = 0.2, 0.28  # the ratio to the policy that wrote a token counts between 1 − low and 1 + high


def advantages_of(rewards: Sequence[float]) -> list[float]:
    """Of one group: (reward − mean) / standard deviation; 0 where all completions did equally well."""
    values = torch.tensor(rewards, dtype=torch.float64)
    return ((values - values.mean()) / (values.std() + 1e-6)).tolist()


def log_probs(model: Transformer, completions: Sequence[Completion]) -> Tensor:
    """Of every completion token, all completions one behind the other: packed, not padded."""
    texts = [completion.prompt_tokens + completion.tokens for completion in completions]
    tokens_T = torch.tensor([token for text in texts for token in text])
    layout = PackedLayout.from_lengths([len(text) for text in texts])  # each sees only itself
    hidden_TD = model(tokens_T, layout).hidden_TD
    logits_TV = hidden_TD @ model.head_weight.T
    ends, places = 0, []
    for completion, text in zip(completions, texts, strict=True):
        ends += len(text)
        places += range(ends - len(completion.tokens), ends)
    places_N = torch.tensor(places)
    chosen_N1 = tokens_T[places_N, None]
    return logits_TV[places_N - 1].log_softmax(-1).gather(1, chosen_N1)[:, 0]


def loss_of(model: Transformer, completions: Sequence[Completion], advantages: Sequence[float]) -> Tensor:
    """PPO's clipped surrogate, every token weighing the same."""
    now_N = log_probs(model, completions)
    old_N = torch.tensor([value for completion in completions for value in completion.policy_logprobs])
    sizes = torch.tensor([len(completion.tokens) for completion in completions])
    advantage_N = torch.tensor(advantages, dtype=now_N.dtype).repeat_interleave(sizes)
    ratio_N = (now_N - old_N).exp()
    clipped_N = ratio_N.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    return -torch.minimum(ratio_N * advantage_N, clipped_N * advantage_N).mean()


def step(engine: tlt.Engine, task: ToyTask, optimizer: torch.optim.Optimizer, number: int) -> tuple[float, float, int]:
    """Rollout, rewards, update. Mean reward, seconds of the rollout, completion tokens."""
    prompts = task.sample(number, PROMPTS)
    asked = [prompt for prompt in prompts for _ in range(GROUP)]
    started = time.perf_counter()
    completions = engine.generate(asked, seed=number)
    seconds = time.perf_counter() - started
    rewards = [task.reward(prompt, completion) for prompt, completion in zip(asked, completions, strict=True)]
    groups = [rewards[first : first + GROUP] for first in range(0, len(rewards), GROUP)]
    advantages = [advantage for group in groups for advantage in advantages_of(group)]
    optimizer.zero_grad()
    loss_of(engine.model, completions, advantages).backward()
    torch.nn.utils.clip_grad_norm_(engine.model.parameters(), 1.0)
    optimizer.step()
    engine.weights_changed()
    return sum(rewards) / len(rewards), seconds, sum(len(completion.tokens) for completion in completions)


def train(steps: int = 20, *, drafter: str = "suffix", policy: str = "tiny") -> list[float]:
    """The mean reward of each step."""
    rewards = []
    task = ToyTask(ToySettings(median_ops=4, max_ops=12, pool=PROMPTS), seed=0)  # the same prompts in every step
    with tlt.Engine.open(policy, drafter=drafter, max_tokens=256) as engine:
        engine.model.requires_grad_(True)
        optimizer = torch.optim.AdamW(engine.model.parameters(), lr=5e-4, betas=(0.9, 0.95), weight_decay=0.0)
        for number in range(1, steps + 1):
            reward, seconds, tokens = step(engine, task, optimizer, number)
            rewards.append(reward)
            speculation = engine.report().speculation
            accepted = f", accept length {speculation.accept_length:.2f}" if speculation else ""
            print(f"step {number}: reward {reward:.3f}, {tokens} tokens in {seconds:.2f} s{accepted}")
    return rewards


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--drafter", default="suffix", help="none, suffix")
    options = parser.parse_args()
    train(options.steps, drafter=options.drafter)
