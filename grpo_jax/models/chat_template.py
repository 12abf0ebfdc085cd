"""The ChatML chat template with Hermes tool calls, for tokenizers without one.

The tiny model's byte tokenizer carries `HERMES_CHATML`; `rollout.chat` uses the same
tool section for pretrained models whose own template knows no tools (SmolLM2). The
wire format is Qwen2.5's: schemas one a line inside `<tools>` at the end of the system
turn, calls inside `<tool_call>`, consecutive results as `<tool_response>` blocks of a
single user turn. Plain text only: no tokenizer, no JAX.
"""

TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
CONTROL_TOKENS = (TURN_START, TURN_END)

TOOLS_INTRO = "You can call these tools, given as JSON schemas:\n<tools>"
TOOLS_OUTRO = (
    "\n</tools>\nTo call one, write its name and arguments as JSON:\n"
    '<tool_call>\n{"name": "NAME", "arguments": {"KEY": "VALUE"}}\n</tool_call>'
)


def _quoted(text: str) -> str:
    """Return `text` as a Jinja string literal."""
    return "'" + text.replace("\\", "\\\\").replace("\n", "\\n") + "'"


HERMES_CHATML = """\
{%- set first_system = messages[0].content if messages[0].role == 'system' else '' %}
{%- if tools or first_system %}
    {{- '<|im_start|>system\\n' + first_system }}
    {%- if tools %}
        {{- ('\\n\\n' if first_system else '') + INTRO }}
        {%- for tool in tools %}
            {{- '\\n' + (tool | tojson) }}
        {%- endfor %}
        {{- OUTRO }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- elif not (loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '' if loop.first and not message.content else '\\n' }}
            {{- '<tool_call>\\n' }}
            {%- set body = {'name': call.function.name,
                            'arguments': call.function.arguments} %}
            {{- body | tojson }}
            {{- '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""".replace("INTRO", _quoted(TOOLS_INTRO)).replace("OUTRO", _quoted(TOOLS_OUTRO))
