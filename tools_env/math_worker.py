"""The process in which math-verify compares answers; started by `tools_env.answers`.

Reads one JSON pair [gold, answer] a line and writes "1" or "0" a line, after a first
line "ready". A separate process, since an answer such as 9^{9^{9^9}} can neither be
finished nor interrupted inside a thread; its owner kills it at the deadline. It imports
nothing of this package, so it starts from its path alone.
"""

import json
import logging
import sys


def main(memory_bytes: int) -> None:
    if sys.platform == "linux":
        import resource  # not on every system

        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    from math_verify import (
        ExprExtractionConfig,
        LatexExtractionConfig,
        parse,
        verify,
    )

    logging.disable()  # math-verify warns that its own time limit is off
    kinds = (LatexExtractionConfig(), ExprExtractionConfig())

    def read(text: str) -> list:
        return parse(f"${text}$", extraction_config=kinds, parsing_timeout=None)

    print("ready", flush=True)
    for line in sys.stdin:
        gold, answer = json.loads(line)
        try:
            equal = verify(read(gold), read(answer), timeout_seconds=None)
        except Exception:  # nothing that can be compared
            equal = False
        print(int(equal), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
