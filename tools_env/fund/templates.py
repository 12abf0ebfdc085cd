"""What a request template is; the texts are in templates_en and templates_zh.

A language module gives `REQUESTS[split][category]`, a tuple of templates; for combos
`PHRASES[split][action]`, imperative phrases, and `CONNECTORS[split]`, sentences that
join them as {first}, {second} and {third}, in the order of execution whatever the order
of the words; and the words that fill the slots. No template serves two splits.
"""

from __future__ import annotations

from dataclasses import dataclass

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Template:
    """A request with slots in braces.

    `side` is an order's side. `hard` marks a hard negative: a request dressed in the
    words of another category.
    """

    text: str
    side: str | None = None
    hard: bool = False


def buy(text: str, hard: bool = False) -> Template:
    return Template(text, "buy", hard)


def sell(text: str, hard: bool = False) -> Template:
    return Template(text, "sell", hard)


def hard(text: str) -> Template:
    return Template(text, hard=True)


def plain(*texts: str) -> tuple[Template, ...]:
    return tuple(Template(text) for text in texts)
