"""README.md: its code runs, its links to lines lead to what they name."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_code_blocks_run_and_print_what_they_say(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    names = {}  # a block continues those before it
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    [expected] = re.findall(r"print\(.*# about ([\d.]+);", README)
    assert float(capsys.readouterr().out) == pytest.approx(float(expected), abs=0.03)


def test_links_to_lines():
    links = re.findall(r"\[`([^`]+)`\]\(([\w.]+)#L(\d+)\)", README)
    assert links
    for text, file, line in links:
        assert text in (ROOT / file).read_text().splitlines()[int(line) - 1], (text, file, line)


def test_links_to_files():
    for file in re.findall(r"\]\(([\w./]+\.\w+)(?:#\w+)?\)", README):
        assert (ROOT / file).exists(), file
