"""Tasks of our own: each makes a question from random numbers and a size, its number of lines, records, turns or words."""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Callable

from bench.answers.question import Question
from bench.answers.words import ADJECTIVES, CLASSES, NOUNS, PLACES, REMARKS

_VOWELS, _CONSONANTS = "aeiou", "bdfgklmnprstvz"


def invented(rng: random.Random, count: int) -> list[str]:
    """Different words of three syllables."""
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(3))] = None
    return list(found)


def pairs(rng: random.Random, count: int) -> list[tuple[str, str]]:
    """Different keys of an adjective and a noun."""
    chosen = rng.sample(range(len(ADJECTIVES) * len(NOUNS)), count)
    return [(ADJECTIVES[each // len(NOUNS)], NOUNS[each % len(NOUNS)]) for each in chosen]


def numbers(rng: random.Random, count: int, digits: int = 5) -> list[str]:
    return [str(each) for each in rng.sample(range(10 ** (digits - 1), 10**digits), count)]


def records(rng: random.Random, size: int) -> Question:
    """One of many similar lines by a key of two words."""
    keys, values = pairs(rng, size), numbers(rng, size)
    lines = [f"The {' '.join(key)} has the number {value}." for key, value in zip(keys, values, strict=True)]
    asked = rng.randrange(size)
    name = " ".join(keys[asked])
    text = f"Here is a list of numbers.\n\n{chr(10).join(lines)}\n\nWhich number does the {name} have?"
    return Question(text, f"The {name} has the number", f" {values[asked]}", [values[asked]], [lines[asked]])


def uuids(rng: random.Random, size: int) -> Question:
    """One of many lines by a key that is a uuid."""
    keys, values = ([str(uuid.UUID(int=rng.getrandbits(128), version=4)) for _ in range(size)] for _ in range(2))
    lines = [f"key {key}: value {value}" for key, value in zip(keys, values, strict=True)]
    asked = rng.randrange(size)
    text = f"Here is a list of keys and values.\n\n{chr(10).join(lines)}\n\nWhat is the value of the key {keys[asked]}?"
    return Question(text, f"The value of the key {keys[asked]} is", f" {values[asked]}", [values[asked]], [lines[asked]])


def track(rng: random.Random, size: int) -> Question:
    """Five variables that hold one value, by a chain of assignments between other chains and remarks."""
    names, values = [each.upper() for each in invented(rng, 25)], numbers(rng, 5)
    lines = [rng.choice(REMARKS) for _ in range(size)]
    chains = [names[5 * each : 5 * each + 5] for each in range(5)]
    placed: dict[int, str] = {}
    for chain, value in zip(chains, values, strict=True):
        free = sorted(rng.sample(sorted(set(range(size)) - set(placed)), 5))
        sources = [value, *(f"VAR {each}" for each in chain[:-1])]
        placed |= {place: f"VAR {name} = {source}" for place, name, source in zip(free, chain, sources, strict=True)}
    evidence = [line for line in placed.values() if line.split()[1] in chains[0]]
    for place, line in placed.items():
        lines[place] = line
    asked = f"Find all variables that are assigned the value {values[0]}, directly or through another variable."
    text = f"Track the assignments of variables in this text.\n\n{chr(10).join(lines)}\n\n{asked}"
    return Question(text, f"The five variables that hold {values[0]} are:", " " + ", ".join(chains[0]), chains[0], evidence)


def frequent(rng: random.Random, size: int) -> Question:
    """The three most frequent of invented words, most frequent first."""
    words = invented(rng, 1200)
    top, rest = words[:3], words[3:]
    counts = [round(size * share) for share in (0.09, 0.065, 0.045)]
    drawn = [word for word, count in zip(top, counts, strict=True) for _ in range(count)]
    drawn += [rest[each % len(rest)] for each in range(size - len(drawn))]
    rng.shuffle(drawn)
    question = "Which three words appear most often, the most frequent first?"
    text = f"Here is a list of invented words.\n\n{' '.join(drawn)}\n\n{question}"
    return Question(text, "The three words that appear most often are:", " " + ", ".join(top), top)


def json_value(rng: random.Random, size: int) -> Question:
    """A value of a record in a JSON document."""
    names = ["-".join(each) for each in pairs(rng, size)]
    serials, weights = numbers(rng, size, 6), numbers(rng, size, 4)
    entries = [
        {
            "name": name,
            "place": rng.choice(PLACES),
            "weight_in_grams": int(weight),
            "tags": rng.sample(NOUNS, 4),
            "remark": rng.choice(REMARKS),
            "checked": rng.random() < 0.5,
            "serial": int(serial),
        }
        for name, serial, weight in zip(names, serials, weights, strict=True)
    ]
    asked = rng.randrange(size)
    text = f"{json.dumps(entries, indent=1)}\n\nWhat is the serial of the entry whose name is {names[asked]}?"
    evidence = [f'"name": "{names[asked]}"', f'"serial": {serials[asked]}']
    return Question(text, f"The serial of {names[asked]} is", f" {serials[asked]}", [serials[asked]], evidence)


def code(rng: random.Random, size: int) -> Question:
    """The value of a constant in long source code."""
    names, values = ["_".join(each).upper() for each in pairs(rng, size)], numbers(rng, size, 4)
    parts = []
    for (adjective, noun), name, value in zip(pairs(rng, size), names, values, strict=True):
        one, two, three = rng.sample(NOUNS, 3)
        parts.append(
            f"{name} = {value}\n\n\ndef {adjective}_{noun}({one}, {two}, limit={name}):\n"
            f'    """Return the {adjective} {noun} of {one} and {two}."""\n    {three} = []\n'
            f"    for item in {one}:\n        if item.{noun} < limit and item not in {two}:\n"
            f"            {three}.append(item.{rng.choice(ADJECTIVES)} * {rng.randrange(2, 100)})\n"
            f"    return sorted({three})\n"
        )
    asked = rng.randrange(size)
    text = f"```python\n{chr(10).join(parts)}```\n\nWhich value is assigned to the constant {names[asked]}?"
    return Question(text, f"{names[asked]} =", f" {values[asked]}", [values[asked]], [f"{names[asked]} = {values[asked]}"])


def dialogue(rng: random.Random, size: int) -> Question:
    """A fact of an early turn of a dialogue, in which other facts of its kind follow."""
    keys, values = pairs(rng, size), numbers(rng, size)
    told = max(1, size // 8)
    turns = []
    for turn, ((adjective, noun), value) in enumerate(zip(keys, values, strict=True)):
        said = f"{rng.choice(REMARKS)} {rng.choice(REMARKS)}"
        # every fourth turn, and the one that is asked for, tells a code
        fact = f" The code of my {adjective} {noun} is {value}." if turn == told or turn % 4 == 0 else ""
        thanks = "Thank you, I shall remember it." if fact else "I see. Please go on."
        turns.append(f"User: {said}{fact}\nAssistant: {thanks} {rng.choice(REMARKS)}\n")
    name = " ".join(keys[told])
    text = f"Here is a conversation.\n\n{''.join(turns)}\nWhat is the code of the user's {name}?"
    fact = f"The code of my {name} is {values[told]}."
    return Question(text, f"The code of the user's {name} is", f" {values[told]}", [values[told]], [fact])


def many_shot(rng: random.Random, size: int) -> Question:
    """The class of a new word by many examples of classes with invented names."""
    labels = dict(zip(CLASSES, invented(rng, len(CLASSES)), strict=True))
    held_out = {kind: rng.choice(words) for kind, words in CLASSES.items()}
    known = [(word, kind) for kind, words in CLASSES.items() for word in words if word != held_out[kind]]
    asked = rng.choice(list(CLASSES))

    def sentence(word: str) -> str:
        return f"In {rng.choice(PLACES)} somebody spoke of {word}. {rng.choice(REMARKS)}"

    drawn = [known[each % len(known)] for each in range(size)]
    rng.shuffle(drawn)
    lines = [f"{sentence(word)} Class: {labels[kind]}" for word, kind in drawn]
    question = f"Which class has this one? {sentence(held_out[asked])}"
    text = f"Learn the classes from these examples.\n\n{chr(10).join(lines)}\n\n{question}"
    return Question(text, "Class:", f" {labels[asked]}", [labels[asked]])


TASKS: dict[str, Callable[[random.Random, int], Question]] = {
    "records": records,
    "uuids": uuids,
    "track": track,
    "frequent": frequent,
    "json": json_value,
    "code": code,
    "dialogue": dialogue,
    "many_shot": many_shot,
}
