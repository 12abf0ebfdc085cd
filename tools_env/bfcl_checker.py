"""The process in which the Function Calling Leaderboard's own code runs.

Started by `tools_env.bfcl` with the folder of the unpacked wheel. The leaderboard's
checker imports its table of models, and with that every vendor's client; one neutral
entry stands in for the table, which the checker asks only whether a model needs
underscores for the dots in names. Reads a line of JSON a question, writes one a line.
"""

import json
import os
import sys
import types

MODEL = "neutral"
_HINTED = {"simple_java": "JAVA", "simple_javascript": "JAVASCRIPT"}


def main(folder: str) -> None:
    sys.path.insert(0, folder)
    os.environ["BFCL_PROJECT_ROOT"] = folder  # it makes folders for results there
    table = types.ModuleType("bfcl_eval.constants.model_config")
    entry = types.SimpleNamespace(underscore_to_dot=False)
    table.MODEL_CONFIG_MAPPING = {MODEL: entry}
    sys.modules[table.__name__] = table
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever it prints is no answer
    from bfcl_eval import utils
    from bfcl_eval.constants.enums import Language
    from bfcl_eval.constants.type_mappings import GORILLA_TO_OPENAPI
    from bfcl_eval.eval_checker.ast_eval.ast_checker import ast_checker

    def load(category: str) -> dict:
        """Entries as models see them, as the checker does, answers, type names."""
        plain = utils.load_dataset_entry(category, include_language_specific_hint=False)
        relevance = utils.is_relevance_or_irrelevance(category)
        gold = [] if relevance else utils.load_ground_truth_entry(category)
        return {
            "shown": utils.load_dataset_entry(category),
            "functions": [one["function"] for one in plain],
            "answers": [one["ground_truth"] for one in gold],
            "types": GORILLA_TO_OPENAPI,
        }

    def check(category: str, calls: list, functions: list, answer: list) -> dict:
        """The verdict on calls {name: arguments}: valid, and if not the error."""
        if utils.is_relevance_or_irrelevance(category):
            called = not utils.is_empty_output(calls)
            valid = called != ("irrelevance" in category)
            return {"valid": valid, "error_type": None if valid else "relevance"}
        language = Language[_HINTED.get(category, "PYTHON")]
        try:
            return ast_checker(functions, calls, answer, language, category, MODEL)
        except Exception as error:  # of values that it does not expect
            return {"valid": False, "error_type": "checker", "error": [repr(error)]}

    print("ready", file=answers, flush=True)
    commands = {"load": load, "check": check}
    for line in sys.stdin:
        command, arguments = json.loads(line)
        print(json.dumps(commands[command](*arguments)), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
