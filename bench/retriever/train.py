"""Train the retriever: ``python -m bench.retriever.train --out DIR --minutes 20``.

LlamaForCausalLM in bfloat16 with float32 copies for the optimizer. Rows grow, tokens per step stay. ``DIR`` receives
``log.jsonl``, ``checkpoint.pt`` every minute, from which the same command resumes, and ``model/``.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, linear
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from bench.retriever.batches import TrainingBatch, make_batch
from bench.retriever.schedule import is_stage_done, learning_rate, parse_stages
from bench.retriever.vocabulary import FIRST_VALUE, TOKEN_IDS, TOKENS, save_tokenizer

MAX_TOKENS = 131072
LOG_EVERY = 20
CHECKPOINT_SECONDS = 60


def make_config() -> LlamaConfig:
    """About 5 million parameters. The RoPE base of 1e7 leaves 18 of a head's 64 dimensions under one radian in 65,536 tokens."""
    return LlamaConfig(
        vocab_size=64 * -(-len(TOKENS) // 64),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_TOKENS,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7},
        tie_word_embeddings=True,
        pad_token_id=TOKEN_IDS["<pad>"],
        bos_token_id=TOKEN_IDS["<bos>"],
        eos_token_id=TOKEN_IDS["<eos>"],
    )


class Trainer:
    """Model, optimizer and progress; `seed` determines weights and rows."""

    def __init__(self, device: torch.device, seed: int) -> None:
        torch.manual_seed(seed)
        self.seed = seed
        self.model = LlamaForCausalLM(make_config())
        torch.nn.Module.to(self.model, device)
        self.masters = [parameter.detach().clone() for parameter in self.model.parameters()]
        self.model.bfloat16()
        self.optimizer = torch.optim.AdamW(self.masters, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
        self.generator = torch.Generator(device)
        self.step_count = 0
        self.seconds = 0.0
        self.stage = 0
        self.stage_seconds = 0.0

    def step(self, batch_tokens: int, num_tokens: int, rate: float) -> Tensor:
        """One optimizer step; loss and shares of right tokens and answers, on the device."""
        self.generator.manual_seed(self.seed * 10_000_000 + self.step_count)
        batch = make_batch(max(1, batch_tokens // num_tokens), num_tokens, self.generator)
        loss, measures = self.loss(batch)
        self.model.zero_grad()
        loss.backward()
        for master, parameter in zip(self.masters, self.model.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self._copy_masters()
        self.step_count += 1
        return measures

    def loss(self, batch: TrainingBatch) -> tuple[Tensor, Tensor]:
        """Mean cross-entropy over the answer tokens, and the measures of `step`."""
        hidden = self.model.model(input_ids=batch.token_ids, use_cache=False).last_hidden_state
        rows = torch.arange(hidden.shape[0], device=hidden.device)[:, None, None]
        # Tokens before the values are never an answer. Pushing all their output weights away from every answer
        # alike would make them alike, and they are also the embeddings that distinguish keys.
        weight = self.model.lm_head.weight
        weight = torch.cat([weight[:FIRST_VALUE].detach(), weight[FIRST_VALUE:]])
        logits = linear(hidden[rows, batch.positions], weight)  # (batch, num_questions, 4, vocab_size)
        losses = cross_entropy(logits.flatten(0, 2).float(), batch.targets.flatten(), reduction="none")
        counted = batch.is_asked[..., None].expand_as(batch.targets)
        loss = (losses.view_as(counted) * counted).sum() / counted.sum()
        right = logits.detach().argmax(-1) == batch.targets
        accuracy = (right & counted).sum() / counted.sum()
        answer_accuracy = (right.all(-1) & batch.is_first).sum() / batch.is_first.sum()
        return loss, torch.stack([loss.detach(), accuracy, answer_accuracy])

    @torch.no_grad()
    def _copy_masters(self) -> None:
        for master, parameter in zip(self.masters, self.model.parameters(), strict=True):
            parameter.copy_(master)

    def save(self, path: Path) -> None:
        """Write a checkpoint atomically."""
        names = ("masters", "step_count", "seconds", "stage", "stage_seconds")
        state = {name: getattr(self, name) for name in names} | {"optimizer": self.optimizer.state_dict()}
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def load(self, path: Path) -> None:
        state = torch.load(path, map_location=self.masters[0].device, weights_only=True)
        for master, saved in zip(self.masters, state["masters"], strict=True):
            master.copy_(saved)
        self._copy_masters()
        self.optimizer.load_state_dict(state["optimizer"])
        for name in ("step_count", "seconds", "stage", "stage_seconds"):
            setattr(self, name, state[name])


def train(trainer: Trainer, out: Path, minutes: float, stages: str, batch_tokens: int, peak_rate: float) -> None:
    """Train until ``minutes``, including earlier runs, have passed."""
    plan = parse_stages(stages)
    total = 60 * minutes
    recent: list[Tensor] = []
    started = checkpointed = time.monotonic()
    seconds_before = trainer.seconds
    with (
        tqdm(total=round(total), initial=round(trainer.seconds), unit="s") as bar,
        (out / "log.jsonl").open("a") as log,
    ):
        while trainer.seconds < total:
            stage = plan[min(trainer.stage, len(plan) - 1)]
            rate = learning_rate(peak_rate, trainer.step_count, trainer.seconds / total)
            recent.append(trainer.step(batch_tokens, stage.num_tokens, rate))
            if len(recent) < LOG_EVERY:
                continue
            loss, accuracy, answers = (round(value, 4) for value in torch.stack(recent).mean(0).tolist())
            recent.clear()
            now = time.monotonic()
            trainer.stage_seconds += seconds_before + now - started - trainer.seconds
            trainer.seconds = seconds_before + now - started
            line = {
                "step": trainer.step_count,
                "seconds": round(trainer.seconds, 1),
                "length": stage.num_tokens,
                "rate": round(rate, 6),
                "loss": loss,
                "accuracy": accuracy,
                "answers": answers,
            }
            log.write(json.dumps(line) + "\n")
            log.flush()
            bar.set_description(f"{stage.num_tokens} tokens, loss {loss:.3f}, answers {answers:.1%}")
            bar.update(round(min(trainer.seconds, total)) - bar.n)
            if trainer.stage < len(plan) - 1 and is_stage_done(trainer.stage_seconds / total, stage.share, answers):
                trainer.stage += 1
                trainer.stage_seconds = 0.0
            if now - checkpointed > CHECKPOINT_SECONDS or trainer.seconds >= total:
                trainer.save(out / "checkpoint.pt")
                checkpointed = now


def save_model(model: LlamaForCausalLM, folder: Path) -> None:
    """Write weights, configuration and tokenizer for transformers."""
    model.save_pretrained(folder, max_shard_size="14MB")
    # transformers before 5 reads the RoPE base from here, later releases from "rope_parameters"
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"rope_theta": dict(model.config.rope_parameters or {})["rope_theta"]}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    save_tokenizer(folder, MAX_TOKENS)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for log, checkpoint and model")
    parser.add_argument("--minutes", type=float, default=20.0, help="training time, interrupted runs added up")
    parser.add_argument(
        "--stages",
        default="512:60,2048:45,8192:60,16384:90,32768:300,65536:375",
        help="lengths of the rows in tokens, each with its share of the time",
    )
    parser.add_argument("--batch-tokens", type=int, default=131072, help="tokens per step")
    parser.add_argument("--rate", type=float, default=2e-3, help="largest learning rate")
    parser.add_argument("--attention", choices=("cudnn", "flash"), default="cudnn", help="SDPA kernel to try first")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)

    options.out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(torch.device(options.device), options.seed)
    if (options.out / "checkpoint.pt").exists():
        trainer.load(options.out / "checkpoint.pt")
    kernels = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    if options.attention == "flash":
        kernels.reverse()
    with sdpa_kernel([*kernels, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], set_priority=True):
        train(trainer, options.out, options.minutes, options.stages, options.batch_tokens, options.rate)
    save_model(trainer.model, options.out / "model")


if __name__ == "__main__":
    main()
