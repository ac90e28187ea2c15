"""Chat templates of many families, and folders of models that have them."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[3] / "data" / "chat_templates"
TEMPLATES = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.jinja"))}
"""Each begins with a comment: what it needs of a tokenizer, which conversation it takes, and the text of each turn."""

Served = Callable[..., Path]
"""Makes a folder with a chat template, a tokenizer that has its special tokens, and a configuration. A second argument
is the model whose tokenizer it is, which otherwise follows from the template."""


def described(template: str) -> dict[str, Any]:
    comment = re.match(r"\{#- (.*) -#\}", template)
    return json.loads(comment[1]) if comment else {}
