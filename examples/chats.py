"""Writes examples/chats.jsonl: conversations about small Python expressions, whose answers Python itself computes."""

import json
import random
from pathlib import Path

WORDS = ["spam", "eggs", "ham", "tree", "node", "graph", "rank", "shard", "batch", "token"]
SYSTEM = "You answer questions about Python with the value alone."


def question(draw: random.Random) -> tuple[str, str]:
    """An expression, asked for in one of several ways, and its value."""
    word, number, other = draw.choice(WORDS), draw.randint(0, 20), draw.randint(1, 9)
    expression, value = draw.choice(
        [
            (f"{number} + {other}", number + other),
            (f"{number} * {other}", number * other),
            (f"{number} // {other}", number // other),
            (f"{number} > {other}", number > other),
            (f"max({number}, {other})", max(number, other)),
            (f"list(range({other}))", list(range(other))),
            (f"len('{word}')", len(word)),
            (f"'{word}'.upper()", word.upper()),
            (f"'{word}'[0]", word[0]),
            (f"'{word}'[::-1]", word[::-1]),
            (f"'{word}'.count('{word[0]}')", word.count(word[0])),
            (f"sorted('{word}')[0]", sorted(word)[0]),
        ]
    )
    asked = draw.choice(["What is {}?", "What does {} give?", "Evaluate {}.", "Tell me the value of {}."])
    return asked.format(expression), repr(value)


def main() -> None:
    """Write 400 conversations of one to three questions."""
    draw, lines = random.Random(7), []
    for _ in range(400):
        messages = [{"role": "system", "content": SYSTEM}] if draw.random() < 0.3 else []
        for asked, value in (question(draw) for _ in range(draw.randint(1, 3))):
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": value}]
        lines.append(json.dumps({"messages": messages}))
    (Path(__file__).parent / "chats.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
