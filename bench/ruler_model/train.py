"""Train the model: ``python -m bench.ruler_model.train --out DIR --minutes 20 --start bench/retriever/model``.

It is a Llama like the retriever's, with more layers, trained the same way on rows that mix all tasks. ``--start`` takes the
weights of a trained one: of the same shape, or of the retriever, between whose layers new ones are put that begin by doing
nothing. ``DIR`` receives ``log.jsonl`` with the share of right answers by task, and every minute ``model/`` and
``checkpoint.pt``. The same command goes on where a checkpoint left off.
``torchrun --nproc-per-node 2 -m bench.ruler_model.train ...`` trains on two GPUs, with twice the rows a step.
"""

import argparse
import json
import os
import shutil
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear
from transformers import LlamaConfig, LlamaForCausalLM

from bench.retriever.schedule import learning_rate, parse_stages
from bench.retriever.train import Trainer, make_config, save_model
from bench.ruler_model.batches import make_batch
from bench.ruler_model.forward import hidden_states
from bench.ruler_model.rows import MIN_TOKENS, TASKS, Rows
from bench.ruler_model.vocabulary import END_OF_VALUES, FIRST_VALUE, TOKENS, VOCAB_SIZE

LOG_EVERY = 20
SAVE_SECONDS = 60
NEW_LAYERS = (2, 4, 6)  # among seven, between the retriever's four


def model_config(layers: int) -> LlamaConfig:
    """The retriever's configuration with so many layers: 7.8 million parameters with 7."""
    config = make_config()
    config.num_hidden_layers = layers
    config.vocab_size = VOCAB_SIZE
    return config


def start_model(layers: int, start: Path | None) -> LlamaForCausalLM:
    """Make a model in float32, with weights drawn at random or those of the folder ``start``.

    A model of seven layers takes the retriever's four; the three between them have output projections of zero.
    """
    model = LlamaForCausalLM(model_config(layers))
    if start is None:
        return model
    given = LlamaForCausalLM.from_pretrained(start, dtype=torch.float32)
    if given.config.num_hidden_layers == layers:
        model.load_state_dict(given.state_dict())
        return model
    if (given.config.num_hidden_layers, layers) != (4, 7):
        have = given.config.num_hidden_layers
        raise ValueError(f"a start must have {layers} layers, or 4 for a model of 7; {start} has {have}")
    old = [index for index in range(layers) if index not in NEW_LAYERS]
    with torch.no_grad():
        for index in NEW_LAYERS:
            model.model.layers[index].self_attn.o_proj.weight.zero_()
            model.model.layers[index].mlp.down_proj.weight.zero_()
        known = len(given.model.embed_tokens.weight[:END_OF_VALUES])
        model.model.embed_tokens.weight[:known] = given.model.embed_tokens.weight[:known]
        model.model.norm.load_state_dict(given.model.norm.state_dict())
        for index, layer in zip(old, given.model.layers, strict=True):
            model.model.layers[index].load_state_dict(layer.state_dict())
    return model


class TasksTrainer(Trainer):
    """The model, its optimizer, and their progress, in one of several processes.

    Parameters
    ----------
    device : torch.device
    seed : int
    layers : int
    start : Path, optional
        Folder of the model to start from.
    compiled : bool
        Compile what is not attention.
    list_share : float
        Share of the tokens that are lists.
    """

    def __init__(
        self, device: torch.device, seed: int, layers: int, start: Path | None, compiled: bool, list_share: float
    ) -> None:
        super().__init__(device, seed, lambda: start_model(layers, start))
        # Rounding the model to bfloat16 rounds the frequencies of its positions too; loading a trained one does not.
        self.model.model.rotary_emb = type(self.model.model.rotary_emb)(config=self.model.config).to(device)
        self.compiled = compiled
        self.list_share = list_share
        self.processes = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        self.rank = torch.distributed.get_rank() if self.processes > 1 else 0

    def step(self, batch_tokens: int, num_tokens: int, rate: float) -> Tensor:
        """Take one optimizer step; return for each task (right answers, answers, loss, tokens), (tasks, 4), on the device."""
        seed = self.seed * 10_000_000 + self.step_count * self.processes + self.rank
        self.generator.manual_seed(seed)
        batch = make_batch(batch_tokens, num_tokens, self.generator, seed, self.list_share)
        loss, measures = self.loss_by_task(batch)
        self.descend(loss, rate)
        return measures

    def loss_by_task(self, batch: list[Rows]) -> tuple[Tensor, Tensor]:
        """Return the mean over tasks of the mean loss of an answer token, and what ``step`` returns.

        The loss is that of the probability of all tokens that are right. Tokens that are never an answer keep their output
        weights, as in the retriever's training.
        """
        hidden = hidden_states(self.model, [rows.token_ids for rows in batch], self.compiled)
        asked = _questions(batch)
        weight = self.model.lm_head.weight
        values = slice(FIRST_VALUE, END_OF_VALUES)
        weight = torch.cat([weight[:FIRST_VALUE].detach(), weight[values], weight[END_OF_VALUES:].detach()])
        logits = linear(hidden[asked.positions.flatten()], weight).float()  # (questions * 4, vocab_size)
        targets = asked.targets.flatten(0, 1)
        right = logits.gather(1, targets.clamp(min=0)).masked_fill(targets < 0, -torch.inf).logsumexp(1)
        losses = logits.logsumexp(1) - right
        is_answer = asked.is_answer.flatten()
        sums = _sum_by_task(losses * is_answer, asked.task.repeat_interleave(4))
        tokens = _sum_by_task(is_answer.float(), asked.task.repeat_interleave(4))
        there = tokens > 0
        loss = (sums / tokens.clamp(min=1)).sum() / there.sum()
        with torch.no_grad():
            is_right = (logits.argmax(1)[:, None] == targets).any(1) | ~is_answer
            is_right = is_right.view(-1, 4).all(1)
            right_first, first = (is_right & asked.is_first).float(), asked.is_first.float()
            measures = [_sum_by_task(right_first, asked.task), _sum_by_task(first, asked.task), sums, tokens]
        return loss, torch.stack(measures, dim=1).detach()

    def share_gradients(self) -> None:
        """Average the gradients over processes."""
        if self.processes > 1:
            flat = torch.cat([master.grad.flatten() for master in self.masters if master.grad is not None])
            torch.distributed.all_reduce(flat)
            flat /= self.processes
            for master, part in zip(self.masters, flat.split([each.numel() for each in self.masters]), strict=True):
                master.grad = part.view_as(master)

    def sum_of_all(self, measures: Tensor) -> Tensor:
        """Return the sum of all processes' measures, on the CPU."""
        if self.processes > 1:
            torch.distributed.all_reduce(measures)
        return measures.double().cpu()

    def clock(self, seconds: float) -> float:
        """Return the first process's seconds."""
        if self.processes > 1:
            shared = torch.tensor([seconds], device=self.masters[0].device, dtype=torch.float64)
            torch.distributed.broadcast(shared, 0)
            return shared.item()
        return seconds


def _questions(batch: list[Rows]) -> Rows:
    """Return the questions of all rows, without their axis of rows; positions are those in one row of all tokens."""
    joined: dict[str, list[Tensor]] = {field.name: [] for field in fields(Rows)}
    before = 0
    for rows in batch:
        count, num_tokens = rows.token_ids.shape
        starts = before + num_tokens * torch.arange(count, device=rows.token_ids.device)
        before += rows.token_ids.numel()
        flat = {name: getattr(rows, name).flatten(0, 1) for name in joined}
        flat["positions"] = (rows.positions + starts[:, None, None]).flatten(0, 1)
        for name, parts in joined.items():
            parts.append(flat[name])
    return Rows(**{name: torch.cat(parts) for name, parts in joined.items()})


def _sum_by_task(values: Tensor, task: Tensor) -> Tensor:
    return torch.zeros(len(TASKS), device=values.device).index_add(0, task, values)


def stage_is_done(spent: float, share: float, answers: float) -> bool:
    """Return whether to move on to the next length.

    Parameters
    ----------
    spent, share : float
        What the stage has had and was given of the whole training time, 0 to 1.
    answers : float
        Share of right answers, mean over tasks. A task that no length teaches must not hold up the others.
    """
    return answers >= 0.97 or (spent >= share and answers >= 0.5) or spent >= 2 * share


def train(trainer: TasksTrainer, options: argparse.Namespace) -> None:
    """Step until ``minutes`` of training time have passed, including earlier runs."""
    plan, total = parse_stages(options.stages), 60 * options.minutes
    recent: list[Tensor] = []
    started = saved = time.monotonic()
    seconds_before = trainer.seconds
    while trainer.seconds < total:
        stage = plan[min(trainer.stage, len(plan) - 1)]
        rate = learning_rate(options.rate, trainer.step_count, trainer.seconds / total)
        recent.append(trainer.step(options.batch_tokens, stage.num_tokens, rate))
        if len(recent) < options.log_every:
            continue
        right, asked, losses, tokens = trainer.sum_of_all(torch.stack(recent).sum(0)).T
        now = trainer.clock(seconds_before + time.monotonic() - started)
        answers = {task: round((right[i] / asked[i].clamp(min=1)).item(), 4) for i, task in enumerate(TASKS) if tokens[i] > 0}
        loss = {task: round((losses[i] / tokens[i]).item(), 4) for i, task in enumerate(TASKS) if tokens[i] > 0}
        mean = sum(answers.values()) / max(len(answers), 1)
        step_ms = 1000 * (now - trainer.seconds) / len(recent)
        recent.clear()
        trainer.stage_seconds += now - trainer.seconds
        trainer.seconds = now
        if trainer.rank == 0:
            line: dict[str, Any] = {"step": trainer.step_count, "seconds": round(now, 1), "length": stage.num_tokens}
            line |= {"rate": round(rate, 6), "ms": round(step_ms, 1), "mean": round(mean, 4), "answers": answers, "loss": loss}
            with (options.out / "log.jsonl").open("a") as log:
                log.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)
        if trainer.stage < len(plan) - 1 and stage_is_done(trainer.stage_seconds / total, stage.share, mean):
            trainer.stage += 1
            trainer.stage_seconds = 0.0
        if trainer.rank == 0 and (time.monotonic() - saved > SAVE_SECONDS or now >= total):
            trainer.save(options.checkpoint or options.out / "checkpoint.pt")
            replace_model(trainer.model, options.out / "model")
            saved = time.monotonic()


def replace_model(model: LlamaForCausalLM, folder: Path) -> None:
    """Write the model's folder, so that an interrupted write leaves the previous one, or the new one under its other name."""
    new = folder.with_name(folder.name + ".new")
    shutil.rmtree(new, ignore_errors=True)
    save_model(model, new, TOKENS, "10MB")
    shutil.rmtree(folder, ignore_errors=True)
    new.replace(folder)


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    """The command's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for log, checkpoint and model")
    parser.add_argument("--minutes", type=float, default=20.0, help="training time, interrupted runs added up")
    parser.add_argument("--start", type=Path, help="folder of a model to start from (random weights)")
    parser.add_argument("--checkpoint", type=Path, help="file (DIR/checkpoint.pt)")
    parser.add_argument("--layers", type=int, default=7)
    parser.add_argument(
        "--stages",
        default="512:90,2048:60,8192:90,16384:60,32768:75,65536:75",
        help="lengths of the rows in tokens, each with its share of the time",
    )
    parser.add_argument("--batch-tokens", type=int, default=131072, help="tokens per step and process")
    parser.add_argument("--rate", type=float, default=2e-3, help="largest learning rate")
    parser.add_argument("--lists", type=float, default=0.5, help="share of the tokens that are lists of words, in quarters")
    parser.add_argument("--log-every", type=int, default=LOG_EVERY, help="steps")
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if min(stage.num_tokens for stage in parse_stages(options.stages)) < MIN_TOKENS:
        parser.error(f"rows must have at least {MIN_TOKENS} tokens; got {options.stages}")
    return options


def main(arguments: list[str] | None = None) -> None:
    """Read the command line and train."""
    options = options_of(arguments)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        cuda = options.device.startswith("cuda")
        torch.distributed.init_process_group("nccl" if cuda else "gloo")
        if cuda:
            options.device = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(options.device)
    options.out.mkdir(parents=True, exist_ok=True)
    device = torch.device(options.device)
    compiled = device.type == "cuda" and not options.eager
    trainer = TasksTrainer(device, options.seed, options.layers, options.start, compiled, options.lists)
    checkpoint = options.checkpoint or options.out / "checkpoint.pt"
    if checkpoint.exists():
        trainer.load(checkpoint)
    kernels = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(kernels, set_priority=True):
        train(trainer, options)
    if trainer.processes > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
