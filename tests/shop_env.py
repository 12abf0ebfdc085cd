"""Environments of the package verifiers, as its users write them."""

import verifiers as vf
from datasets import Dataset

STOCK = {"tea": 3, "rice": 0}
ROWS = [
    {"question": "How much tea is there?", "answer": "3"},
    {"question": "How much rice is there?", "answer": "0"},
]


async def stock(item: str) -> int:
    """Pieces in stock.

    Args:
        item: What to count.
    """
    return STOCK[item]


def right(completion, answer) -> float:
    return float(completion[-1].content.strip() == answer)


def looked(completion) -> float:
    """The model's own words stand beside its calls."""
    messages = [m for m in completion if m.role == "assistant"]
    calls = [call for m in messages for call in m.tool_calls or []]
    return float(
        bool(calls) and all("<tool_call>" not in m.content for m in completion)
    )


def load_environment(times: int = 1) -> vf.Environment:
    """A tool environment: the answer counts, looking it up counts a fifth."""
    rubric = vf.Rubric(funcs=[right, looked], weights=[1.0, 0.2])
    data = Dataset.from_list(ROWS * times)
    return vf.ToolEnv(
        dataset=data,
        tools=[stock],
        rubric=rubric,
        system_prompt="Look it up.",
        error_formatter=lambda error: f"It failed: {error!r}",
    )


class Till(vf.StatefulToolEnv):
    """Every rollout has a purse that its tool takes from; empty, the rollout ends."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.add_tool(self.pay, args_to_skip=["purse"])
        self.ended = []

    async def setup_state(self, state, **kwargs):
        state["purse"] = [10]

    def update_tool_args(self, tool_name, tool_args, messages, state, **kwargs):
        return {**tool_args, "purse": state["purse"]}

    async def env_response(self, messages, state, **kwargs):
        replies = await super().env_response(messages, state, **kwargs)
        if state["purse"][0] <= 0:
            state["final_env_response"] = replies
        return replies

    @vf.cleanup
    async def close_till(self, state):
        self.ended.append(state["purse"][0])

    async def pay(self, cents: int, purse: list) -> str:
        """Pay.

        Args:
            cents: How much.
        """
        if cents > 100:
            raise vf.InfraError("the bank is closed")
        purse[0] -= cents
        return f"{purse[0]} left"


def till() -> Till:
    def spent(state) -> float:
        return (10 - state["purse"][0]) / 10

    return Till(
        dataset=Dataset.from_list(ROWS),
        eval_dataset=Dataset.from_list(ROWS[:1]),
        rubric=vf.Rubric(funcs=[spent]),
        stop_errors=[vf.InfraError],
    )
