"""The fund assistant: six tools on a small bank, generated requests, two modes.

Single-turn, a policy chooses the tool (`FundEnvironment`, `generate`); multi-turn, it
carries the request out (`FundBankEnvironment`, `generate_bank_tasks`).
"""

from tools_env.fund.bank_environment import FundBankEnvironment
from tools_env.fund.bank_tasks import generate_bank_tasks
from tools_env.fund.environment import FundEnvironment
from tools_env.fund.mixing import mislabel, oversample
from tools_env.fund.tasks import CATEGORIES, generate

__all__ = [
    "CATEGORIES",
    "FundBankEnvironment",
    "FundEnvironment",
    "generate",
    "generate_bank_tasks",
    "mislabel",
    "oversample",
]
