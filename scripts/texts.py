"""The files that scripts play with: real text in many languages, and a chat template."""

from pathlib import Path

DATA = Path(__file__).resolve().parent / "data"
MULTILINGUAL = DATA / "multilingual.txt"
TEMPLATE = DATA / "chat_template.jinja"
