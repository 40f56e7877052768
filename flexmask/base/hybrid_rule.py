"""The thresholds of hybrid selection, from its one knob gamma.

A block, a key block or a block diagonal is dropped where it holds less than its threshold. All thresholds are proportional to
``1 - gamma``, so that gamma = 1 drops nothing. The factors were found by measuring (`bench/fidelity`).
"""

# of a representative row's attention: what one of them gives to a key block keeps it
KEY_BLOCK = 1.0
# of their mean attention: what they give to a block diagonal keeps it
DIAGONAL = 0.2
# of the attention to key means of a query block's rows, as their root mean square: what they give to a key block keeps it
ROWS = 0.2
# of min_blocks: so many of the nearest key blocks are kept in the query blocks of the representative rows. There no other block
# makes up for what one drops, since the next token comes from them. Where their attention is diffuse, no threshold sees any of
# it, and half of min_blocks lost prompts of RULER at 8k and 16k tokens; the number of blocks repaired them, not their content.
NEAREST = 2
