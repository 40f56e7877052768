"""Random selections as masks, and what they say by definition, in loops over tokens."""

from dataclasses import dataclass

import torch

from flexmask.export import from_block_map


@dataclass
class Drawn:
    """A mask, its map of kept blocks as nested lists, and its geometry."""

    mask: object
    kept: list
    q_len: int
    kv_len: int
    block_size: int
    offset: int
    window: int | None
    tokens: list

    def sees(self, prompt, row, key):
        position = self.offset + row
        near = 0 <= position - key and (self.window is None or position - key < self.window)
        return near and self.tokens[prompt][key] and self.tokens[prompt][position]

    def pairs(self):
        """(batch, num_heads, q_len, kv_len) bool."""
        size = self.block_size
        return torch.tensor(
            [
                [
                    [
                        [bool(blocks[row // size][key // size]) and self.sees(prompt, row, key) for key in range(self.kv_len)]
                        for row in range(self.q_len)
                    ]
                    for blocks in heads
                ]
                for prompt, heads in enumerate(self.kept)
            ]
        )


SHAPES = {
    "one token": (1, 1, 16),
    "63": (63, 63, 16),
    "129": (129, 129, 32),
    "129 in one block": (129, 129, 256),
    "chunk at a block": (40, 72, 32),
    "chunk inside a block": (50, 129, 32),
    "one row of many": (1, 100, 16),
}
LONG = {"1000": (1000, 1000, 128), "chunk of 1000": (200, 1000, 64)}


def drawn(shape, heads=3, batch=1, window=None, padded=False, offset=None, empty=(), seed=0):
    """A random selection, with its diagonals, of which heads in `empty` keep nothing."""
    q_len, kv_len, size = shape
    random = torch.Generator().manual_seed(seed)
    tokens = torch.ones(batch, kv_len, dtype=torch.bool)
    if padded:
        tokens[0, : kv_len // 3] = False
    scores = {"window": window, "attention_mask": tokens.long() if padded else None, "q_offset": offset}
    start = kv_len - q_len if offset is None else offset
    q_blocks, kv_blocks = -(-q_len // size), -(-kv_len // size)
    kept = torch.zeros(batch, heads, q_blocks, kv_blocks, dtype=torch.bool)
    limits = Drawn(None, [], q_len, kv_len, size, start, window, tokens.tolist())
    for prompt in range(batch):
        for i in range(q_blocks):
            rows = range(i * size, min((i + 1) * size, q_len))
            own = {(start + row) // size for row in rows}
            for j in range(kv_blocks):
                keys = range(j * size, min((j + 1) * size, kv_len))
                if any(limits.sees(prompt, row, key) for row in rows for key in keys):
                    chosen = torch.rand(heads, generator=random) < 0.4
                    kept[prompt, :, i, j] = True if j in own else chosen
    for head in empty:
        kept[:, head] = False
    mask = from_block_map(kept, q_len, kv_len, block_size=size, **scores)
    return Drawn(mask, kept.tolist(), q_len, kv_len, size, start, window, tokens.tolist())
