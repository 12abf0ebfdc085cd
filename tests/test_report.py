"""The tables, the progress line and the page, from what a run leaves behind."""

import io
import json
from html.parser import HTMLParser

import pytest
from rich.console import Console

from grpo_jax import report
from grpo_jax.config import BadInput
from grpo_jax.metrics import Metrics

BEFORE = {"eval/score/all": 0.25, "eval/score/combo": 0.1, "eval/call_rate": 0.9}
AFTER = {
    "eval/score/all": 0.75,
    "eval/score/combo": 0.05,
    "eval/score/order": 1.0,
    "eval/tool_accuracy/all": 0.5,
}
CONFUSION = {
    "place_order": {"place_order": 7, "none": 2},
    "check_balance": {"check_balance": 31, "place_order": 1},
}


def printed(*arguments, width=100):
    out = io.StringIO()
    report.summary(*arguments, console=Console(file=out, width=width))
    return out.getvalue()


def row_of(text, name):
    """The cells of the table row that starts with `name`."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("│")]
        if name in cells:
            return cells[2:-1]
    raise AssertionError(f"no row {name} in\n{text}")


def test_summary_by_category_before_and_after():
    text = printed(BEFORE, AFTER)
    assert row_of(text, "combo") == ["0.100", "0.050", "-0.050"]
    assert row_of(text, "all") == ["0.250", "0.750", "+0.500"]
    assert row_of(text, "order") == ["", "1.000", ""]
    assert text.index("order") < text.index("all")  # the total comes last
    assert "call_rate" not in text and "\x1b" not in text  # no colours off a terminal


def test_confusion_has_right_calls_on_the_diagonal():
    text = printed(None, AFTER, CONFUSION)
    assert row_of(text, "check_balance") == ["31", "1", "."]
    assert row_of(text, "place_order") == [".", "7", "2"]


def test_progress_off_a_terminal_is_a_line_a_step(capsys):
    progress = report.LiveProgress("train", total=3, done=1)
    progress.step(2, {"reward": 0.123456, "tools/call_rate": 1.0, "other": 5})
    progress.close()
    assert capsys.readouterr().err == "train 2/3  reward 0.1235  calls 1\n"


def test_progress_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    progress = report.LiveProgress("train", total=3)
    progress.step(3, {"reward": 0.5})
    progress.close()
    error = capsys.readouterr().err
    assert "3/3" in error and "reward 0.5" in error


def trajectory(group, reward, text):
    return {
        "task_id": f"t{group}",
        "group": group,
        "segments": [
            {"source": "PROMPT", "text": "ask", "tokens": [1], "logprobs": None},
            {"source": "MODEL", "text": text, "tokens": [2], "logprobs": [-0.1]},
        ],
        "calls": [
            {"name": "python", "arguments": {"code": "1<2"}, "status": "ok"}
            | {"result": "True & so"}
        ],
        "rewards": {"correct": reward},
        "reward": reward,
        "stop": "stop",
    }


class Page(HTMLParser):
    """Collects tags and text, and checks that tags nest."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.words = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        assert not {"src", "href"} & {name for name, _ in attributes}

    def handle_data(self, data):
        self.words.append(data)


def test_page_shows_charts_and_escaped_trajectories(tmp_path):
    writer = Metrics(tmp_path)
    for step in (1, 2, 3):
        writer.write(step, {"reward": step / 4, "time/rollout": 1.0, "note": "x"})
    writer.close()
    folder = tmp_path / "rollouts"
    folder.mkdir()
    (folder / "step_000002.jsonl").write_text("not read: an older step")
    rows = [trajectory(g, g / 10, f"<script>{g}</script>") for g in range(6)]
    rows[1]["reward"] = None  # abstained
    lines = "".join(json.dumps(row) + "\n" for row in rows) + '{"task_id": "cut'
    (folder / "step_000003.jsonl").write_text(lines)

    path = report.write_html(tmp_path)
    assert path == tmp_path / "report.html"
    page = Page(path.read_text())
    assert page.tags.count("svg") == 2 and "script" not in page.tags
    text = " ".join(page.words)
    assert "<script>3</script>" in text and '{"code": "1<2"}' in text
    assert "True & so" in text and "reward none" in text
    assert "<script>4</script>" not in text  # the first four groups only


def test_page_without_rollouts_and_without_metrics(tmp_path):
    with pytest.raises(BadInput, match="no metrics"):
        report.write_html(tmp_path)
    writer = Metrics(tmp_path)
    writer.write(1, {"reward": 1.0})
    writer.close()
    assert "svg" in report.write_html(tmp_path).read_text()
