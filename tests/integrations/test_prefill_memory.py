"""A long padded prompt takes no memory by pairs of tokens."""

import subprocess
import sys

import pytest

from tests.repository import ROOT

TOKENS = 32768

# Its own process; only Linux lets a process reset its peak.
CODE = """
import sys
from pathlib import Path
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from flexmask.integrations.huggingface import sparse_prefill

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024

def prefill(length):
    mask = torch.ones(1, length, dtype=torch.int64)
    mask[:, :100] = 0
    with torch.no_grad():
        model(torch.arange(length)[None] % 97, attention_mask=mask, logits_to_keep=1)

sizes = dict(vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, head_dim=16)
model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=1, max_position_embeddings=1 << 16)).eval()
with sparse_prefill(model, gamma=0.5, min_budget=128, dense_below=0) as run:
    prefill(600)  # compiles, for these sizes and then for all
    prefill(700)
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    prefill(int(sys.argv[1]))
print(peak() - before, float(run.stats[0][-1].density.max()))
"""


@pytest.mark.attention
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_long_padded_prompt_stays_far_below_a_map_of_tokens():
    command = [sys.executable, "-c", CODE, str(TOKENS)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    growth, density = map(float, run.stdout.split())
    assert density < 0.7
    # a bool per pair would be 1024 MiB
    assert growth < TOKENS**2 / 4
