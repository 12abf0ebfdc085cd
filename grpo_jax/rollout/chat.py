"""Chat templates as token suffixes.

A conversation is append-only: the engine feeds `Chat.prompt` once, the model's own
sampled ids follow untouched, and each `Chat.observation` is the exact text that the
tokenizer's chat template writes between two model turns. Suffixes are found by
rendering a short probe conversation whose model turn is one sentinel character and
cutting the render there; nothing that was sampled is ever rendered or encoded again.

Control tokens come from the template alone. Every control token spelled out in user,
system or tool text (and in tool schemas) gets the character `_CUT` after its first
letter before the template sees it, and the render is encoded piece by piece between
cuts, so the tokenizer never meets the whole spelling. Text without such spellings is
encoded as the tokenizer would encode the plain render. Model turns given as text (SFT,
few-shot) may use markup tokens such as `<tool_call>`, but no special ones. `_CUT` and
`_EDGE` are Unicode noncharacters; in content they become U+FFFD.

A template that ignores `tools` (SmolLM2's ChatML) is served in Hermes form: schemas at
the end of the system turn, consecutive results as `<tool_response>` blocks of one user
turn, calls of earlier messages as `<tool_call>` blocks.
"""

import copy
import json
import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from grpo_jax.models.chat_template import TOOLS_INTRO, TOOLS_OUTRO
from tools_env import compact
from tools_env.functions import tool_name

Message = dict[str, Any]

_CUT = "\ufdd0"  # keeps the spelling of a control token from being encoded as one
_EDGE = "\ufdd1"  # stands for a model turn in a probe conversation
_PROBE = {"role": "user", "content": "question"}
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {}},
    },
}


class Chat:
    """The chat format of one tokenizer and one set of tools.

    `tools` are OpenAI schemas, `protocol` how calls are written (`tools_env.calls`);
    "compact" leaves the template's own tool section unused. `stop_ids` are further ids
    that end a model turn, as in a model's generation_config. With `own_tools` the
    schemas that rows bring are shown as they are, not looked up in `tools`. Raises
    ValueError naming the tokenizer when its template is missing, fails, or rewrites
    earlier turns (strips their thinking).
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        tools: Sequence[dict] = (),
        *,
        stop_ids: Iterable[int] = (),
        protocol: str = "hermes",
        own_tools: bool = False,
    ):
        self.tokenizer = tokenizer
        self.protocol = protocol
        self.own_tools = own_tools
        self.name = tokenizer.name_or_path or "the tokenizer"
        if not tokenizer.chat_template:
            raise ValueError(f"{self.name} has no chat template")
        added = tokenizer.added_tokens_decoder
        self._any_token = _spelling([token.content for token in added.values()])
        special = [token.content for token in added.values() if token.special]
        self._special_token = _spelling(special)
        self.tools = [_guard(tool, self._any_token) for tool in tools]
        probe = [_PROBE]
        self._knows_tools = self._template(probe, [_PROBE_TOOL], False) != (
            self._template(probe, [], False)
        )
        self._end, end_id = self._turn_end()
        self._special_token = _spelling([*special, self._end])
        eos_id = tokenizer.eos_token_id
        ids = (end_id, *([] if eos_id is None else [eos_id]), *stop_ids)
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys(ids))
        self._check_append_only()

    def with_tools(self, tools: Sequence[dict]) -> "Chat":
        """Return the same format with other tools, as SFT rows bring their own."""
        other = copy.copy(self)
        other.tools = [_guard(tool, self._any_token) for tool in tools]
        return other

    def offering(self, chosen: Sequence[Any] | None) -> "Chat":
        """Return the same format with the tools that a row chooses, all if it does not.

        `chosen` names some of the tools, or holds schemas with their names. ValueError
        for one that is not among them, unless rows bring their own.
        """
        if not chosen:
            return self
        if self.own_tools:
            return self.with_tools(chosen)
        known = {tool_name(tool): tool for tool in self.tools}
        names = [tool_name(one) for one in chosen]
        if missing := [name for name in names if name not in known]:
            raise ValueError(
                f"its column 'tools' names {missing[0]!r}, which the environment does "
                f"not have; it has: {', '.join(known) or 'none'}"
            )
        other = copy.copy(self)
        other.tools = [known[name] for name in names]
        return other

    def render(self, messages: Sequence[Message], *, generation: bool = True) -> str:
        """Return the template's one-shot text of `messages` with the tools."""
        return self._render(messages, generation).replace(_CUT, "")

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of `messages`, tools and the generation prompt."""
        return self._encode(self._render(messages, True))

    def observation(
        self, results: Sequence[str], stop_sampled: int | None
    ) -> list[int]:
        """Return the ids between a model turn and the next one.

        They are: the turn's end token when the model was cut before sampling one
        (`stop_sampled` None; any sampled stop id takes its place), the text the
        template puts after it, the results of the turn's calls in order, and the next
        generation prompt.
        """
        if not results:
            raise ValueError("an observation needs at least one tool result")
        tail = self._tail([{"role": "tool", "content": text} for text in results], True)
        if stop_sampled is not None:
            tail = tail.removeprefix(self._end)
        return self._encode(tail)

    def demonstration(
        self, messages: Sequence[Message], num_prompt_messages: int | None = None
    ) -> list[tuple[str, list[int]]]:
        """Split a finished conversation into ("prompt" | "model" | "tool", ids) pieces.

        The pieces decode to the one-shot render. A model piece ends with the turn's end
        token; what the template writes after it opens the next piece. The prompt is
        `num_prompt_messages` long, by default all that precedes the first model turn.
        """
        turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        turns = [i for i in turns if i >= (num_prompt_messages or 0)]
        if not turns:
            raise ValueError("a demonstration needs at least one assistant message")
        text = self._render(messages, False)
        start = self._render(messages[: turns[0]], True)
        if not text.startswith(start):
            raise ValueError(self._rewrites("the start of a conversation"))
        pieces, at = [("prompt", start)], len(start)
        for i, following in zip(turns, [*turns[1:], None], strict=True):
            between = messages[i + 1 : following]
            last = following is None
            tail = self._tail(between, generation=not last)
            found = len(text) - len(tail) if last else text.find(tail, at)
            if found < at or not text.startswith(tail, found):
                raise ValueError(
                    self._rewrites(f"message {i + 1} of this conversation")
                )
            pieces.append(("model", text[at:found] + self._end))
            pieces.append(("tool", tail.removeprefix(self._end)))
            at = found + len(tail)
        return [(source, self._encode(piece)) for source, piece in pieces if piece]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, control tokens spelled out."""
        return self.tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def turn_text(self, ids: Sequence[int]) -> str:
        """Return the text of a model turn without its final stop token."""
        ids = list(ids)
        return self.decode(ids[:-1] if ids and ids[-1] in self.stop_ids else ids)

    def _encode(self, text: str) -> list[int]:
        pieces = [piece for piece in text.split(_CUT) if piece]
        encode = self.tokenizer.encode
        return [i for piece in pieces for i in encode(piece, add_special_tokens=False)]

    def _render(self, messages: Sequence[Message], generation: bool) -> str:
        """Return the render with `_CUT` inside every spelled-out control token."""
        return self._apply([self._guarded(m) for m in messages], generation)

    def _guarded(self, message: Message) -> Message:
        trusted = message["role"] == "assistant"
        pattern = self._special_token if trusted else self._any_token
        kept = {key: value for key, value in message.items() if value is not None}
        return _guard({"content": "", **kept}, pattern)

    def _apply(self, guarded: list[Message], generation: bool) -> str:
        if self.protocol == "compact":
            plain = compact.plain_messages(guarded, self.tools)
            return self._template(plain, [], generation)
        if self._knows_tools:
            return self._template(guarded, self.tools, generation)
        return self._template(_hermes(guarded, self.tools), [], generation)

    def _template(self, messages: list[Message], tools: list, generation: bool) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                messages,
                tools=tools or None,
                add_generation_prompt=generation,
                tokenize=False,
            )
        except (TemplateError, TypeError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ValueError(
                f"the chat template of {self.name} fails on roles {roles}: {error}"
            ) from error

    def _tail(self, following: Sequence[Message], generation: bool) -> str:
        """Return what the template writes from the end of a model turn on."""
        guarded = [self._guarded(message) for message in following]
        turn = {"role": "assistant", "content": _EDGE}
        _, *tail = self._apply([_PROBE, turn, *guarded], generation).split(_EDGE)
        if len(tail) != 1:
            raise ValueError(self._rewrites("a model turn"))
        return tail[0]

    def _turn_end(self) -> tuple[str, int]:
        """Return the text and id of the control token that ends a model turn."""
        tail = self._tail([], False)
        vocabulary = self.tokenizer.get_added_vocab()
        ends = [token for token in vocabulary if tail.startswith(token)]
        if not ends:
            raise ValueError(
                f"the chat template of {self.name} ends a model turn with {tail!r},"
                " not with a control token"
            )
        end = max(ends, key=len)
        return end, vocabulary[end]

    def _check_append_only(self) -> None:
        turn = {"role": "assistant", "content": "<think>\nplan\n</think>\n\ndone"}
        result = {"role": "tool", "content": "result"}
        start, tail = self._render([_PROBE], True), self._tail([result], True)
        several = self._render([_PROBE, turn, result, turn, result], True)
        if several != start + 2 * (turn["content"] + tail):
            raise ValueError(self._rewrites("earlier turns (their thinking, perhaps)"))

    def _rewrites(self, what: str) -> str:
        return (
            f"the chat template of {self.name} is not append-only: it rewrites {what}"
            " when more messages follow; give the tokenizer a template that keeps them"
        )


def _spelling(tokens: Iterable[str]) -> re.Pattern[str]:
    """Match the first character of every spelled-out token, overlapping ones too.

    Single characters and runs of white space are vocabulary rather than control.
    """
    names = [re.escape(token) for token in tokens if len(token) > 1 and token.strip()]
    return re.compile(f"(?=(?:{'|'.join(names)}))(.)" if names else "(?!)()", re.DOTALL)


def _guard(value: Any, pattern: re.Pattern[str]) -> Any:
    """Return `value` with `_CUT` inside every token spelled out in its strings."""
    match value:
        case str():
            clean = value.replace(_CUT, "\ufffd").replace(_EDGE, "\ufffd")
            return pattern.sub(rf"\1{_CUT}", clean)
        case list() | tuple():
            return [_guard(item, pattern) for item in value]
        case dict():
            return {_guard(k, pattern): _guard(v, pattern) for k, v in value.items()}
    return value


def _hermes(messages: list[Message], tools: list[dict]) -> list[Message]:
    """Put tools, calls and tool results into plain system, assistant and user turns."""
    system = [m for m in messages[:1] if m["role"] == "system"]
    turns: list[Message] = []
    rest = messages[len(system) :]
    for role, run in groupby(rest, key=lambda message: message["role"]):
        if role == "tool":
            turns.append({"role": "user", "content": _response_blocks(run)})
        else:
            turns += [{"role": role, "content": _with_calls(m)} for m in run]
    if tools:
        lines = [json.dumps(tool, ensure_ascii=False) for tool in tools]
        section = "\n".join([TOOLS_INTRO, *lines]) + TOOLS_OUTRO
        instructions = [message["content"] for message in system] + [section]
        system = [{"role": "system", "content": "\n\n".join(instructions)}]
    return system + turns


def _response_blocks(results: Iterable[Message]) -> str:
    texts = [result["content"] for result in results]
    return "\n".join(f"<tool_response>\n{text}\n</tool_response>" for text in texts)


def _with_calls(message: Message) -> str:
    """Return the content of a message followed by its calls as Hermes blocks."""
    blocks = [message["content"]] if message["content"] else []
    for call in message.get("tool_calls", []):
        body = json.dumps(call["function"], ensure_ascii=False)
        blocks.append(f"<tool_call>\n{body}\n</tool_call>")
    return "\n".join(blocks)
